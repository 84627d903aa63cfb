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
// features 2 g and 2 g + 1. tests/unit/ops/quantised/test_dgrad_fragments.py goes through both on paper.
//
// A cluster of two blocks computes 256 rows x 256 features: each block 128 features, sharing dy and ext by multicast.
// Warpgroup 0 copies, warpgroups 1 and 2 multiply 64 features each.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "host.cuh"
#include "hopper.cuh"
#include "lora.cuh"
#include "wgmma_registers.cuh"

namespace fp8_dgrad {

constexpr int kFeatures = 128;  // of a thread block's tile
constexpr int kClusterFeatures = 2 * kFeatures;
constexpr int kStageDepth = 128;  // codes of a swizzled row of 128 bytes
constexpr int kStageChunks = kDepth / kChunk;
constexpr int kStages = 4;
constexpr int kThreads = 384;
constexpr int kWarpsOfCluster = 16;  // that multiply
constexpr int kPriority = -1;        // as lora_gemm.cuh's
constexpr int kHalfRows = kTileRows / 2;
constexpr int kRowBytes = 128;
constexpr int kHalfBytes = kHalfRows * kRowBytes;
constexpr int kWeightBytes = kStageDepth * kRowBytes;

struct Problem {
  CUtensorMap dy, weight, out, ext, factor;
  const float* row_scales;    // [rows]
  const float* block_scales;  // [ceil(depth / 128), ceil(features / 128)]; null: none
  int rows, features, depth;
  int row_tiles, feature_tiles, group;
  int num_targets;
  const int* tile_chunks;  // [row_tiles, num_targets + 1]; null: no rank part
  const int* chunk_rows;   // a chunk: its first row in the arena
  const int* row_keys;     // [rows], null: no dropout
  const int* row_slots;    // [rows], -1: no adapter
  const float* dropout;    // [slots]
  int dropout_key, first_column;
  int overlaps_previous_kernel;  // all but ext was written before the previous kernel started
};

struct Tile {
  int row, feature;  // of the cluster's tile

  __device__ Tile(const Problem& p, int index) {
    const int group_tiles = p.group * p.feature_tiles;
    const int first = index / group_tiles * p.group;
    const int height = min(p.group, p.row_tiles - first);
    const int inside = index % group_tiles;
    row = (first + inside % height) * kTileRows;
    feature = inside / height * kClusterFeatures;
  }
};

struct Chunks {
  int begin, end;

  __device__ Chunks(const Problem& p, const Tile& tile) : begin(0), end(0) {
    if (p.tile_chunks == nullptr) return;
    const int* bounds = p.tile_chunks + tile.row / kTileRows * (p.num_targets + 1);
    begin = bounds[0];
    end = bounds[p.num_targets];
  }
};

// Position in the ring: stage, and the parity of the round.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Shared {
  alignas(1024) uint8_t dy[kStages][2 * kHalfBytes];    // codes [256 rows][128 n]; or ext, panels [64 ranks][64 rows]
  alignas(1024) uint8_t weight[kStages][kWeightBytes];  // codes [128 n][128 features]; or A, panels [64 ranks][64]
  alignas(1024) uint8_t out[2][2][kPanel];              // warpgroup, turn
  float row_scales[2][kTileRows];                       // warpgroup
  uint64_t full[kStages], empty[kStages];
};

// 4 bytes into shared memory, later; zero if not `inside`.
__device__ __forceinline__ void copy_word_later(void* to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Not plain loads: the compiler would move them all to one place, and spill.
__device__ __forceinline__ float2 load_shared_pair(uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_word(uint32_t at, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

template <bool kDropout>
struct Producer {
  const Problem& p;
  Shared& shared;
  const int block;
  Ring ring;
  bool waited = false;  // for the kernel that makes ext

  __device__ void run() {
    for (int index = blockIdx.x / 2; index < p.row_tiles * p.feature_tiles; index += gridDim.x / 2) {
      const Tile tile(p, index);
      const int feature = tile.feature + block * kFeatures;
      for (int n = 0; n < p.depth; n += kStageDepth) {
        uint64_t* full = begin_stage(kWeightBytes + 2 * kHalfBytes);
        load_tile(shared.weight[ring.stage], &p.weight, full, feature, n);
        load_tile_both(shared.dy[ring.stage] + block * kHalfBytes, &p.dy, full, n, tile.row + block * kHalfRows);
        ring.advance();
      }
      // Dropout masks the chunks' sum by itself, for which there are registers for half of the rows at a time.
      if constexpr (kDropout) {
        load_chunks(tile, feature, 0, 2);
        load_chunks(tile, feature, 2, 4);
      } else {
        load_chunks(tile, feature, 0, 4);
      }
    }
    if (!waited) wait_for_previous();
    // The other block may still copy into this one or arrive here: leave only when the ring is empty.
    for (int i = 0; i < kStages; ++i, ring.advance()) barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
  }

  __device__ uint64_t* begin_stage(int bytes) {
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&shared.full[ring.stage], bytes);
    return &shared.full[ring.stage];
  }

  // Of ext, the panels of 64 rows from `begin` to `end`.
  __device__ void load_chunks(const Tile& tile, int feature, int begin, int end) {
    const Chunks chunks(p, tile);
    if (!waited) {
      wait_for_previous();
      let_next_start();
      waited = true;
    }
    for (int chunk = chunks.begin; chunk < chunks.end; chunk += kStageChunks) {
      const int count = min(kStageChunks, chunks.end - chunk);
      uint64_t* full = begin_stage((end - begin) * kPanel + count * kFeatures * kChunk * 2);
      for (int panel = begin + block; panel < end; panel += 2)
        load_tile_both(shared.dy[ring.stage] + panel * kPanel, &p.ext, full, panel * 64, chunk * kChunk);
      for (int i = 0; i < count; ++i)
        for (int panel = 0; panel < 2; ++panel)
          load_tile(shared.weight[ring.stage] + panel * kPanel + i * kChunk * kRowBytes, &p.factor, full,
                    feature + panel * 64, p.chunk_rows[chunk + i]);
      ring.advance();
    }
  }
};

template <bool kBlocks, bool kDropout>
struct Consumer {
  const Problem& p;
  Shared& shared;
  const int warpgroup;
  Ring ring;
  bool waited = false;

  // Accumulators of 128 rows: of every 8, a thread holds rows 2 q and 2 q + 1 (q = lane % 4) of features 2 g and
  // 2 g + 1 (g = lane / 4) of its warp's 16, in the order (2 g, 2 q), (2 g, 2 q + 1), (2 g + 1, 2 q), ...
  using Half = float[64];

  // In the warpgroup. Read where it is needed: there is no register to keep it in.
  __device__ static int thread() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x % 128;
  }

  __device__ static int lane() { return thread() % 32; }
  __device__ static int warp() { return thread() / 32; }

  __device__ void run() {
    Half sums[2], part;
    for (int index = blockIdx.x / 2; index < p.row_tiles * p.feature_tiles; index += gridDim.x / 2) {
      const Tile tile(p, index);
      const int feature = tile.feature + cluster_block() * kFeatures;
      const Chunks chunks(p, tile);
      copy_scales(tile.row);
      multiply(sums, part, feature);
      scale(sums);
      if constexpr (kDropout) {
        if (chunks.begin < chunks.end) add_dropped(sums, part, chunks, tile.row, feature + warpgroup * 64);
      } else {
        multiply_chunks<0, 2>(sums, chunks, 1);
      }
      store(sums, tile.row, feature + warpgroup * 64);
    }
    if (thread() == 0) store_wait_all();
  }

  __device__ void release() {
    if (lane() < 2) barrier_arrive(&shared.empty[ring.stage], lane());
    ring.advance();
  }

  // Later: they arrive while the warpgroup multiplies.
  __device__ void copy_scales(int row) {
#pragma unroll
    for (int i = thread(); i < kTileRows; i += 128) {
      const bool inside = row + i < p.rows;
      copy_word_later(&shared.row_scales[warpgroup][i], p.row_scales + (inside ? row + i : 0), inside);
    }
  }

  __device__ void multiply(Half (&sums)[2], Half& part, int feature) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.f;
    const int block_columns = (p.features + kFeatures - 1) / kFeatures;
    const float* block_scale = nullptr;
    if (kBlocks) block_scale = p.block_scales + min(feature / kFeatures, block_columns - 1);
    for (int n = 0; n < p.depth; n += kStageDepth) {
      float factor = 1.f;
      if constexpr (kBlocks) {
        factor = __ldg(block_scale);
        block_scale += block_columns;
      }
      barrier_wait(&shared.full[ring.stage], ring.parity);
      uint32_t a[4][4];
      load_codes(a);
      const uint64_t b = operand(shared.dy[ring.stage], 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_codes_n128(part, a[i], b + ((half * kHalfBytes + i * 32) >> 4), i != 0);
        wgmma_commit();
        wgmma_wait<0>();
        if (half == 1) release();
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[half][i] = kBlocks ? fmaf(part[i], factor, sums[half][i]) : sums[half][i] + part[i];
      }
    }
  }

  // W^T of the warp's 16 features x the stage's 128 n, as fragments of four steps of 32. Matrix i of an `ldmatrix` has
  // these 8 of the 32 n as rows, so that its lane q of a row gets, of a 4 n that a product wants together, the first
  // two in one register and the last two in the next (the other way round for q > 1: then no two rows of a matrix lie
  // in the same banks).
  __device__ void load_codes(uint32_t (&a)[4][4]) {
    const int place = lane() % 8;
    const int even_n = (place / 4 * 5 + place % 4 / 2 * 2) * 2;  // 0, 4, 10, 14: the pairs of the first matrix
    const int pair = lane() / 8 % 2;                             // the second has 2, 6, 8, 12
    const int n = even_n + (pair == 0 ? 0 : place < 4 ? 2 : -2) + place % 2 + lane() / 16 * 16;
    const int chunk = warpgroup * 4 + warp();
    const uint32_t at = shared_address(shared.weight[ring.stage]) + n * kRowBytes + (chunk ^ n % 8) * 16;
    const uint32_t low = lane() % 4 < 2 ? 0x6420 : 0x2064, high = low + 0x1111;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t r[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(at + i * 32 * kRowBytes)
                   : "memory");
      a[i][0] = __byte_perm(r[0], r[1], low);
      a[i][1] = __byte_perm(r[0], r[1], high);
      a[i][2] = __byte_perm(r[2], r[3], low);
      a[i][3] = __byte_perm(r[2], r[3], high);
    }
  }

  __device__ void scale(Half (&sums)[2]) {
    copies_wait();
    warpgroup_sync(warpgroup);
    const uint32_t at = shared_address(shared.row_scales[warpgroup]) + lane() % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 two = load_shared_pair(at + (half * kHalfRows + i * 8) * 4);
        float* s = sums[half] + i * 4;
        s[0] *= two.x;
        s[1] *= two.y;
        s[2] *= two.x;
        s[3] *= two.y;
      }
  }

  // Adds the chunks' products of the halves from kBegin to kEnd.
  template <int kBegin, int kEnd>
  __device__ void multiply_chunks(Half (&sums)[kEnd - kBegin], Chunks chunks, int accumulate) {
    for (int chunk = chunks.begin; chunk < chunks.end; chunk += kStageChunks) {
      const int count = min(kStageChunks, chunks.end - chunk);
      barrier_wait(&shared.full[ring.stage], ring.parity);
      uint64_t b = operand(shared.dy[ring.stage], kPanel);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        uint32_t a[4];
        load_chunk(a, i);
        wgmma_fence();
#pragma unroll
        for (int half = kBegin; half < kEnd; ++half)
          wgmma_ranks_n128(sums[half - kBegin], a, b + (half * 2 * kPanel >> 4), accumulate);
        wgmma_commit();
        wgmma_wait<0>();
        b += kChunk * kRowBytes >> 4;
        accumulate = 1;
      }
      release();
    }
  }

  // A^T of the warp's 16 features x 16 ranks, features in the order of load_codes.
  __device__ void load_chunk(uint32_t (&a)[4], int place) {
    const int g = lane() / 4, q = lane() % 4;
    const uint32_t panel = shared_address(shared.weight[ring.stage]) + warpgroup * kPanel + place * kChunk * kRowBytes;
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

  __device__ void add_dropped(Half (&sums)[2], Half& part, Chunks chunks, int row, int feature) {
    put_masks(row);
    add_dropped_half<0>(sums[0], part, chunks, feature);
    add_dropped_half<1>(sums[1], part, chunks, feature);
  }

  // Each row's key and how many places it drops, where the tile's result will lie.
  __device__ void put_masks(int row) {
    if (thread() == 0) store_wait_read<0>();
    warpgroup_sync(warpgroup);
    const uint32_t at = shared_address(shared.out[warpgroup]);
#pragma unroll
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
  template <int kHalf>
  __device__ void add_dropped_half(Half& sums, Half& part, Chunks chunks, int feature) {
    multiply_chunks<kHalf, kHalf + 1>(reinterpret_cast<Half(&)[1]>(part), chunks, 0);
    const int mine = p.first_column + feature + warp() * 16 + lane() / 4 * 2;
    const uint32_t steps = seed_steps(mine) + mine / 2 % 4 * kSeedStep;
    const uint32_t multiplier = pair_bits(1, mine / 8 % 4);
    const uint32_t at = shared_address(shared.out[warpgroup]) + (kHalf * kHalfRows + lane() % 4 * 2) * 8;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
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

  __device__ void store(Half (&sums)[2], int row, int feature) {
    const int g = lane() / 4, q = lane() % 4;
    const int chunk = warp() * 2 + g / 4;
#pragma unroll
    for (int panel = 0; panel < 4; ++panel) {
      uint8_t* to = shared.out[warpgroup][panel % 2];
      if (thread() == 0) store_wait_read<1>();
      warpgroup_sync(warpgroup);
      const uint32_t at = shared_address(to) + q * 2 * kRowBytes + g % 4 * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float* s = sums[panel / 2] + panel % 2 * 32 + i * 4;
        const uint32_t eight = at + i * 8 * kRowBytes;
        store_shared_word(eight + (chunk ^ q * 2) * 16, pack_pair(s[0], s[2]));
        store_shared_word(eight + kRowBytes + (chunk ^ q * 2 + 1) * 16, pack_pair(s[1], s[3]));
      }
      fence_shared_for_copies();
      warpgroup_sync(warpgroup);
      if (thread() == 0) {
        if (!waited) wait_for_previous();  // it may still use the memory that is now `out`
        waited = true;
        store_tile(to, &p.out, feature, row + panel * 64);
        store_commit();
      }
    }
  }
};

template <bool kBlocks, bool kDropout>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<Shared*>(dynamic);
  if (threadIdx.x == 0) {
    if (shared_address(dynamic) % 1024 != 0) __trap();
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kWarpsOfCluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
  if (!p.overlaps_previous_kernel) wait_for_previous();
  if (threadIdx.x < 128) {
    keep_registers<40>();
    if (threadIdx.x == 0) Producer<kDropout>{p, shared, static_cast<int>(cluster_block())}.run();
  } else {
    take_registers<232>();
    const int warpgroup = threadIdx.x / 128 - 1;
    Consumer<kBlocks, kDropout>{p, shared, warpgroup}.run();
  }
}

template <bool kBlocks>
int launch(const Problem& problem, int blocks, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared);
  static_assert(bytes <= 232448, "what a block of a Hopper GPU may have");
  if (problem.row_keys == nullptr)
    return launch_kernel<kernel<kBlocks, false>>(problem, blocks, kThreads, bytes, 0, stream, kPriority);
  return launch_kernel<kernel<kBlocks, true>>(problem, blocks, kThreads, bytes, 0, stream, kPriority);
}

}  // namespace fp8_dgrad
