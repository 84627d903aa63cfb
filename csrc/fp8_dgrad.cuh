// dx = codes_dy W_codes * row scale + rank part, from the one copy of W that the forward pass reads.
//
// Semantics, for row t of row tile r (256 rows) and feature k, over the blocks b of 128 output columns n:
//   base[t, k] = scale[t] sum_b sw[b, k / 128] sum_{n in b} dy[t, n] W[n, k]       (sw = 1 where W has scales a channel)
//   dx[t, k] = base[t, k] + mask(sum_c sum_j ext[16 c + j, t % 256] A[row_c + j, k])
// over the chunks c of r, as in lora_gemm.cuh. dy and W are e4m3 codes. A block's sum has the precision of Hopper's FP8
// products; all other sums are fp32, over b in ascending order and then the chunks: a row depends on nothing else.
//
// The tensor cores read 8-bit operands along the contraction only, and W [N, K] lies along K. So the kernel computes
// dx^T = W^T dy^T: W^T comes from registers, where `ldmatrix` with its transposition of 16-bit elements and a byte
// permutation put it; dy lies right as it is. Of a warp's 16 features, rows g and g + 8 of a product's fragment are
// features 2 g and 2 g + 1, and the 16 x 16 of A are put together in the same order.
//
// A cluster of two blocks computes 256 rows x 256 features: each block 128 features, sharing dy and ext by multicast.
// Warpgroup 0 copies (fp8_dgrad_copies.cuh), warpgroups 1 and 2 multiply 64 features each.
#pragma once
#include "fp8_dgrad_copies.cuh"
#include "wgmma_registers.cuh"

namespace fp8_dgrad {

template <bool kBlocks, bool kDropout>
struct Consumer {
  const DgradProblem& p;
  DgradShared& shared;
  const int warpgroup;
  Ring ring;
  bool waited = false;

  // Accumulators of 64 rows: of every 8, a thread holds rows 2 q and 2 q + 1 (q = lane % 4) of features 2 g and
  // 2 g + 1 (g = lane / 4) of its warp's 16, in the order (2 g, 2 q), (2 g, 2 q + 1), (2 g + 1, 2 q), ...
  using Slice = float[32];
  using Fragment = uint32_t[4];

  // In the warpgroup. Read where it is needed: there is no register to keep it in.
  __device__ static int thread() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x % 128;
  }

  __device__ static int lane() { return thread() % 32; }
  __device__ static int warp() { return thread() / 32; }

  __device__ void run() {
    Slice sums[kSlices], parts[2];
    for (int index = blockIdx.x / 2; index < p.row_tiles * p.column_tiles; index += gridDim.x / 2) {
      multiply(sums, parts, copy_scales(index));
      asm volatile("" : "+r"(index));  // the rest is computed from it here: no register could have kept it
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows;
      const int feature = feature_of(tile) + warpgroup * 64;
      const Chunks chunks(p, tile);
      scale(sums);
      if constexpr (kDropout) {
        if (chunks.begin < chunks.end) add_dropped(sums, parts[0], chunks, row, feature);
      } else {
        multiply_chunks<0>(sums, chunks, 1);
      }
      store(sums, row, feature);
    }
    if (thread() == 0) store_wait_all();
  }

  __device__ static int feature_of(const Tile& tile) {
    return tile.column_tile * kClusterFeatures + cluster_block() * kFeatures;
  }

  __device__ void release(int stage) {
    if (lane() < 2) barrier_arrive(&shared.empty[stage], lane());
  }

  // Those of the tile's rows, later: they arrive while the warpgroup multiplies. Returns the tile's first feature.
  __device__ int copy_scales(int index) {
    const Tile tile(p, index);
    const int row = tile.row_tile * kTileRows;
#pragma unroll
    for (int i = thread(); i < kTileRows; i += 128) {
      const bool inside = row + i < p.rows;
      copy_word_later(shared_address(&shared.row_scales[warpgroup][i]), p.row_scales + (inside ? row + i : 0), inside);
    }
    return feature_of(tile);
  }

  // Two slices take turns in the registers: one runs while the other is added. W^T's fragments are in use until their
  // products have ended, so those of a stage's last slice end before the next stage's fragments are read, and are added
  // when that stage's first slice runs.
  __device__ void multiply(Slice (&sums)[kSlices], Slice (&parts)[2], int feature) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[0][i] = sums[1][i] = sums[2][i] = sums[3][i] = parts[1][i] = 0.f;
    const CodesPlace place = codes_place();
    float factor = 1.f;
    if constexpr (kBlocks)
      for (int i = 0; i < kScalesAhead; ++i) copy_block_scale(feature, i * kCodes, ring.stage + i);
    for (int n = 0; n < p.depth; n += kCodes) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      const uint64_t b = operand(shared.dy_at(ring.stage), 0);
      wgmma_wait<0>();
      settle(parts[1]);
      Fragment a[4];
      load_steps(a, place);
      begin_slice(parts[0], a, b);
      if (n > 0) release((ring.stage + kStages - 1) % kStages);
      add_slice(sums[3], parts[1], factor);
      begin_slice(parts[1], a, b + (kSliceBytes >> 4));
      if constexpr (kBlocks) {
        copy_block_scale(feature, n + kScalesAhead * kCodes, ring.stage + kScalesAhead);
        copies_wait<kScalesAhead>();
        factor = load_shared_float(block_scale_at(ring.stage));
      }
      wgmma_wait<1>();
      settle(parts[0]);
      add_slice(sums[0], parts[0], factor);
      begin_slice(parts[0], a, b + (2 * kSliceBytes >> 4));
      wgmma_wait<1>();
      settle(parts[1]);
      add_slice(sums[1], parts[1], factor);
      begin_slice(parts[1], a, b + (3 * kSliceBytes >> 4));
      wgmma_wait<1>();
      settle(parts[0]);
      add_slice(sums[2], parts[0], factor);
      ring.advance();
    }
    wgmma_wait<0>();
    settle(parts[1]);
    release((ring.stage + kStages - 1) % kStages);
    add_slice(sums[3], parts[1], factor);
  }

  // Later, into the place of a stage that is still to come. Each warp has places of its own and waits for none but itself.
  __device__ void copy_block_scale(int feature, int n, int stage) {
    const bool inside = n < p.depth;
    const int columns = (p.columns_out + kFeatures - 1) / kFeatures;
    const int at = (inside ? n / kCodes : 0) * columns + min(feature / kFeatures, columns - 1);
    copy_word_later(block_scale_at(stage % kStages), p.block_scales + at, inside);
    copies_commit();
  }

  __device__ uint32_t block_scale_at(int stage) {
    return shared_address(shared.block_scales(warpgroup * 4 + warp()) + stage);
  }

  __device__ static void begin_slice(Slice& part, const Fragment (&a)[4], uint64_t b) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_codes_n64(part, a[i], b + (i * 32 >> 4), i != 0);
    wgmma_commit();
  }

  __device__ static void add_slice(Slice& sums, const Slice& part, float factor) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] = kBlocks ? fmaf(part[i], factor, sums[i]) : sums[i] + part[i];
  }

  // Where a lane's row of the first `ldmatrix` of a stage begins, and which bytes it then takes.
  struct CodesPlace {
    uint32_t offset, low;
  };

  __device__ CodesPlace codes_place() {
    const int place = lane() % 8;
    const int even_n = (place / 4 * 5 + place % 4 / 2 * 2) * 2;  // 0, 4, 10, 14: the pairs of the first matrix
    const int pair = lane() / 8 % 2;                             // the second has 2, 6, 8, 12
    const int n = even_n + (pair == 0 ? 0 : place < 4 ? 2 : -2) + place % 2 + lane() / 16 * 16;
    const int chunk = warpgroup * 4 + warp();
    CodesPlace found{static_cast<uint32_t>(n * kRowBytes + (chunk ^ n % 8) * 16), lane() % 4 < 2 ? 0x6420u : 0x2064u};
    asm volatile("" : "+r"(found.offset), "+r"(found.low));  // kept, not computed again in every stage
    return found;
  }

  // W^T of the warp's 16 features x the stage's 128 n, as fragments of four steps of 32. Matrix i of an `ldmatrix` has
  // these 8 of the 32 n as rows, so that its lane q of a row gets, of a 4 n that a product wants together, the first
  // two in one register and the last two in the next (the other way round for q > 1: then no two rows of a matrix lie
  // in the same banks).
  __device__ void load_steps(Fragment (&a)[4], const CodesPlace& place) {
    const uint32_t at = shared_address(shared.weight_at(ring.stage)) + place.offset;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Fragment r;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(at + i * 32 * kRowBytes)
                   : "memory");
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = __byte_perm(r[j / 2 * 2], r[j / 2 * 2 + 1], place.low + j % 2 * 0x1111);
    }
  }

  __device__ void scale(Slice (&sums)[kSlices]) {
    copies_wait();
    warpgroup_sync(warpgroup);
    const uint32_t at = shared_address(shared.row_scales[warpgroup]) + lane() % 4 * 8;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 two = load_shared_pair(at + (slice * kSliceRows + i * 8) * 4);
        float* s = sums[slice] + i * 4;
        s[0] *= two.x;
        s[1] *= two.y;
        s[2] *= two.x;
        s[3] *= two.y;
      }
  }

  // Adds the chunks' products of some slices, of which kFirst is the first.
  template <int kFirst, int kCount>
  __device__ void multiply_chunks(Slice (&sums)[kCount], Chunks chunks, int accumulate) {
    for (int chunk = chunks.begin; chunk < chunks.end; chunk += kStageChunks) {
      const int count = min(kStageChunks, chunks.end - chunk);
      barrier_wait(&shared.full[ring.stage], ring.parity);
      uint64_t b = operand(shared.dy_at(ring.stage) + kFirst * kPanel, kPanel);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        Fragment a;
        load_chunk(a, i);
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < kCount; ++slice)
          wgmma_ranks_n64(sums[slice], a, b + (slice * kPanel >> 4), accumulate);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int slice = 0; slice < kCount; ++slice) settle(sums[slice]);
        b += kChunk * kRowBytes >> 4;
        accumulate = 1;
      }
      release(ring.stage);
      ring.advance();
    }
  }

  // A^T of the warp's 16 features x 16 ranks, features in the order of load_steps.
  __device__ void load_chunk(Fragment& a, int place) {
    const int g = lane() / 4, q = lane() % 4;
    const uint32_t panel = shared_address(shared.weight_at(ring.stage)) + warpgroup * kPanel + place * kChunk * kRowBytes;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int rank = q * 2 + i % 2 + i / 2 * 8;
      pairs[i] = load_shared_word(panel + rank * kRowBytes + ((warp() * 2 + g / 4) ^ rank % 8) * 16 + g % 4 * 4);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[i * 2] = __byte_perm(pairs[i * 2], pairs[i * 2 + 1], 0x5410);
      a[i * 2 + 1] = __byte_perm(pairs[i * 2], pairs[i * 2 + 1], 0x7632);
    }
  }

  __device__ void add_dropped(Slice (&sums)[kSlices], Slice& part, Chunks chunks, int row, int feature) {
    put_masks(row);
    add_dropped_slice<0>(sums[0], part, chunks, feature);
    add_dropped_slice<1>(sums[1], part, chunks, feature);
    add_dropped_slice<2>(sums[2], part, chunks, feature);
    add_dropped_slice<3>(sums[3], part, chunks, feature);
  }

  // Each row's key and how many places it drops, where the tile's result will lie.
  __device__ void put_masks(int row) {
    if (thread() == 0) store_wait_read<0>();
    warpgroup_sync(warpgroup);
    const uint32_t at = shared_address(shared.out[warpgroup]);
    for (int i = thread(); i < kTileRows; i += 128) {
      const int r = row + i;
      const int slot = r < p.rows ? p.row_slots[r] : -1;
      const Mask mask(slot < 0 ? 0.f : p.dropout[slot]);
      store_shared_word(at + i * 8, slot < 0 ? 0 : mix32(p.row_keys[r] ^ p.dropout_key));
      store_shared_word(at + i * 8 + 4, mask.dropped);
    }
    warpgroup_sync(warpgroup);
  }

  // A thread has one pair of features: of a row, one seed and one pair of bits serve it.
  template <int kSlice>
  __device__ void add_dropped_slice(Slice& sums, Slice& part, Chunks chunks, int feature) {
    multiply_chunks<kSlice>(reinterpret_cast<Slice(&)[1]>(part), chunks, 0);
    const int mine = p.first_column + feature + warp() * 16 + lane() / 4 * 2;
    const uint32_t steps = seed_steps(mine) + mine / 2 % 4 * kSeedStep;
    const uint32_t multiplier = pair_bits(1, mine / 8 % 4);
    const uint32_t at = shared_address(shared.out[warpgroup]) + (kSlice * kSliceRows + lane() % 4 * 2) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 rows = load_shared(at + i * 64);
      add_kept(seed_of(rows.x, steps) * multiplier, rows.y, sums[i * 4], sums[i * 4 + 2], part[i * 4],
               part[i * 4 + 2]);
      add_kept(seed_of(rows.z, steps) * multiplier, rows.w, sums[i * 4 + 1], sums[i * 4 + 3], part[i * 4 + 1],
               part[i * 4 + 3]);
    }
  }

  __device__ static void add_kept(uint32_t bits, uint32_t dropped, float& even_sum, float& odd_sum, float even,
                                  float odd) {
    even_sum += (kLowest - bits & 0xFFFFu) >= dropped ? even : 0.f;
    odd_sum += ((kLowest >> 16) - (bits >> 16) & 0xFFFFu) >= dropped ? odd : 0.f;
  }

  __device__ void store(Slice (&sums)[kSlices], int row, int feature) {
    const int g = lane() / 4, q = lane() % 4;
    const int chunk = warp() * 2 + g / 4;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint8_t* to = shared.out[warpgroup][slice % 2];
      if (thread() == 0) store_wait_read<1>();
      warpgroup_sync(warpgroup);
      const uint32_t at = shared_address(to) + q * 2 * kRowBytes + g % 4 * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float* s = sums[slice] + i * 4;
        const uint32_t eight = at + i * 8 * kRowBytes;
        store_shared_word(eight + (chunk ^ q * 2) * 16, pack_pair(s[0], s[2]));
        store_shared_word(eight + kRowBytes + (chunk ^ q * 2 + 1) * 16, pack_pair(s[1], s[3]));
      }
      fence_shared_for_copies();
      warpgroup_sync(warpgroup);
      if (thread() == 0) {
        if (!waited) wait_for_previous();  // it may still use the memory that is now `out`
        waited = true;
        store_tile(to, &p.out, feature, row + slice * kSliceRows);
        store_commit();
      }
    }
  }
};

template <bool kBlocks, bool kDropout>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ DgradProblem p) {
  extern __shared__ __align__(1024) uint8_t aligned[];
  auto& shared = *reinterpret_cast<DgradShared*>(aligned);
  if (shared_address(aligned) % 1024 != 0) __trap();  // there is no room to align it here
  start_barriers(shared);
  if (!p.overlaps_previous_kernel) wait_for_previous();
  if (threadIdx.x < 128) {
    keep_registers<40>();
    if (threadIdx.x == 0) Producer<kDropout>(p, shared, cluster_block()).run();
  } else {
    take_registers<232>();
    const int warpgroup = threadIdx.x / 128 - 1;
    Consumer<kBlocks, kDropout>{p, shared, warpgroup}.run();
  }
}

template <bool kBlocks>
int launch(const DgradProblem& problem, int blocks, cudaStream_t stream) {
  constexpr int bytes = sizeof(DgradShared);
  static_assert(bytes <= 232448, "what a block of a Hopper GPU may have");
  if (problem.row_keys == nullptr)
    return launch_kernel<kernel<kBlocks, false>>(problem, blocks, kThreads, bytes, 0, stream, kPriority);
  return launch_kernel<kernel<kBlocks, true>>(problem, blocks, kThreads, bytes, 0, stream, kPriority);
}

}  // namespace fp8_dgrad
