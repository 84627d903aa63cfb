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
#include "gemm_tiles.cuh"
#include "wgmma_registers.cuh"

namespace fp8_dgrad {

using namespace gemm;

constexpr int kFeatures = 128;  // of a thread block's tile
constexpr int kClusterFeatures = 2 * kFeatures;
constexpr int kCodes = 128;  // of n in a stage of the ring, and of a block of W's scales
constexpr int kRowBytes = 128;
constexpr int kHalfRows = kTileRows / 2;
constexpr int kHalfBytes = kHalfRows * kRowBytes;
constexpr int kSliceBytes = 64 * kRowBytes;

// Ways through the products of a stage, to be compared.
enum Variant {
  kHalves,    // 128 rows at a time, added when they have ended
  kSlices,    // 64 rows at a time: one slice is added while the next runs; A is read when all have ended
  kOverlaps,  // and A in two parts, each when the products of the one before it have ended
  kTurns,     // 128 rows at a time; a warpgroup begins when the other one is half through
  kVariants,
};

// Named barriers of kTurns, a warpgroup each; 0 to 2 are taken.
constexpr int kTurnBarrier = 3;

// Named barrier by which the second warpgroup begins some stages after the first.
constexpr int kLagBarrier = 5;

__device__ __forceinline__ void turn_wait(int warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(kTurnBarrier + warpgroup) : "memory");
}

__device__ __forceinline__ void turn_give(int warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(kTurnBarrier + warpgroup) : "memory");
}

// `x` is dy; a tile's columns are features, kClusterFeatures of them.
struct DgradProblem : Problem {
  const float* row_scales;    // [rows]
  const float* block_scales;  // [ceil(depth / 128), ceil(columns_out / 128)]; null: none
  // Stages, at most the ring's, by which the second warpgroup begins later: so one stores while the other multiplies.
  int lag;
};

// W lies where other GEMMs have x, dy where they have W: each block reads its own W, and both read all rows of dy.
struct DgradShared : Shared<kTileRows> {
  float row_scales[2][kTileRows];  // warpgroup

  // Codes [128 n][128 features]; or of lora_a, panels [64 ranks][64 features].
  __device__ uint8_t* weight_at(int stage) { return this->x[stage]; }

  // Codes [256 rows][128 n]; or of ext, panels [64 ranks][64 rows].
  __device__ uint8_t* dy_at(int stage) { return this->weight[stage]; }
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
struct Producer : Copies<kTileRows> {
  DgradShared& shared;

  __device__ Producer(const DgradProblem& p, DgradShared& shared, int block)
      : Copies<kTileRows>{p, shared, block}, shared(shared) {}

  __device__ void run() {
    for (int index = blockIdx.x / 2; index < p.row_tiles * p.column_tiles; index += gridDim.x / 2) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows + block * kHalfRows;
      const int feature = tile.column_tile * kClusterFeatures + block * kFeatures;
      for (int n = 0; n < p.depth; n += kCodes) {
        uint64_t* full = begin_stage(Shared<kTileRows>::kStageBytes);
        load_tile(shared.weight_at(ring.stage), &p.weight, full, feature, n);
        load_tile_both(shared.dy_at(ring.stage) + block * kHalfBytes, &p.x, full, n, row);
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
    drain();
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
        load_tile_both(shared.dy_at(ring.stage) + panel * kPanel, &p.ext, full, panel * 64, chunk * kChunk);
      for (int i = 0; i < count; ++i)
        for (int panel = 0; panel < 2; ++panel)
          load_tile(shared.weight_at(ring.stage) + panel * kPanel + i * kChunk * kRowBytes, &p.factors[0], full,
                    feature + panel * 64, p.chunk_rows[chunk + i]);
      ring.advance();
    }
  }
};

template <bool kBlocks, bool kDropout, int kVariant>
struct Consumer {
  const DgradProblem& p;
  DgradShared& shared;
  const int warpgroup;
  Ring ring;
  bool waited = false;
  bool my_turn = warpgroup == 0;  // kTurns: from the start
  static constexpr bool kLags = kVariant == kSlices || kVariant == kOverlaps;

  // Accumulators of 128 rows: of every 8, a thread holds rows 2 q and 2 q + 1 (q = lane % 4) of features 2 g and
  // 2 g + 1 (g = lane / 4) of its warp's 16, in the order (2 g, 2 q), (2 g, 2 q + 1), (2 g + 1, 2 q), ...
  using Half = float[64];
  using Slice = float[32];  // of 64 rows
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
    Half sums[2], part;
    int lag = kLags ? p.lag : 0;  // that is left
    if (kLags && lag > 0 && warpgroup == 1 && blockIdx.x / 2 < p.row_tiles * p.column_tiles) {
      asm volatile("bar.sync %0, 256;" ::"n"(kLagBarrier) : "memory");
      lag = 0;
    }
    for (int index = blockIdx.x / 2; index < p.row_tiles * p.column_tiles; index += gridDim.x / 2) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows;
      const int feature = tile.column_tile * kClusterFeatures + cluster_block() * kFeatures;
      const Chunks chunks(p, tile);
      copy_scales(row);
      if constexpr (kVariant == kSlices || kVariant == kOverlaps)
        multiply_slices(sums, reinterpret_cast<Slice(&)[2]>(part), feature, lag);
      else
        multiply(sums, part, feature);
      scale(sums);
      if constexpr (kDropout) {
        if (chunks.begin < chunks.end) add_dropped(sums, part, chunks, row, feature + warpgroup * 64);
      } else {
        multiply_chunks<0, 2>(sums, chunks, 1);
      }
      store(sums, row, feature + warpgroup * 64);
    }
    if (thread() == 0) store_wait_all();
    if (kVariant == kTurns && warpgroup == 0 && !my_turn) turn_wait(0);
  }

  __device__ void release(int stage) {
    if (lane() < 2) barrier_arrive(&shared.empty[stage], lane());
  }

  __device__ void release() {
    release(ring.stage);
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
    const CodesPlace place = codes_place();
    const int block_columns = (p.columns_out + kFeatures - 1) / kFeatures;
    const float* block_scale = nullptr;
    if (kBlocks) block_scale = p.block_scales + min(feature / kFeatures, block_columns - 1);
    float upcoming = kBlocks ? __ldg(block_scale) : 1.f;  // a stage earlier than it is needed
    for (int n = 0; n < p.depth; n += kCodes) {
      const float factor = upcoming;
      if constexpr (kBlocks) {
        if (n + kCodes < p.depth) block_scale += block_columns;
        upcoming = __ldg(block_scale);
      }
      barrier_wait(&shared.full[ring.stage], ring.parity);
      uint32_t a[4][4];
      load_steps<0, 4>(a, place);
      const uint64_t b = operand(shared.dy_at(ring.stage), 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        settle(part);
        if (kVariant == kTurns && !my_turn) turn_wait(warpgroup);
        my_turn = false;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          wgmma_codes_n128(part, a[i], b + ((half * kHalfBytes + i * 32) >> 4), i != 0);
          if (kVariant == kTurns && i == 1) wgmma_commit();
        }
        wgmma_commit();
        if constexpr (kVariant == kTurns) {
          wgmma_wait<1>();
          turn_give(warpgroup ^ 1);
        }
        wgmma_wait<0>();
        settle(part);
        if (half == 1) release();
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[half][i] = kBlocks ? fmaf(part[i], factor, sums[half][i]) : sums[half][i] + part[i];
      }
    }
  }

  // Two slices of 64 rows take turns in the registers: one runs while the other is added. W^T's fragments are in use until
  // their products have ended, so those of a stage's last slice end before the next stage's fragments are read.
  __device__ void multiply_slices(Half (&sums)[2], Slice (&parts)[2], int feature, int& lag) {
    constexpr bool kParts = kVariant == kOverlaps;
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) parts[1][i] = 0.f;
    const CodesPlace place = codes_place();
    const int block_columns = (p.columns_out + kFeatures - 1) / kFeatures;
    const float* block_scale = nullptr;
    // A thread's own pointer, for all that the compiler knows: else it moves what is loaded into registers of the warp,
    // and waits for it there.
    if (kBlocks) block_scale = p.block_scales + min(feature / kFeatures, block_columns - 1) + (place.offset >> 14);
    float upcoming = kBlocks ? __ldg(block_scale) : 1.f;  // a stage earlier than it is needed
    float factor = 1.f;
    for (int n = 0; n < p.depth; n += kCodes) {
      const float before = factor;
      factor = upcoming;
      if constexpr (kBlocks) {
        if (n + kCodes < p.depth) block_scale += block_columns;
        upcoming = __ldg(block_scale);
      }
      barrier_wait(&shared.full[ring.stage], ring.parity);
      const uint64_t b = operand(shared.dy_at(ring.stage), 0);
      Fragment a[4];
      if constexpr (kParts) {
        uint32_t raw[2][4];
        wgmma_wait<1>();
        load_steps<0, 2>(a, place);
        load_raw(raw[0], place, 2);
        load_raw(raw[1], place, 3);
        wgmma_wait<0>();
        settle(parts[1]);
        permute(a[2], raw[0], place.low);
        permute(a[3], raw[1], place.low);
      } else {
        wgmma_wait<0>();
        settle(parts[1]);
        load_steps<0, 4>(a, place);
      }
      begin_slice<0, 4>(parts[0], a, b);
      // Known: it keeps the compiler from adding before the slice above begins.
      if constexpr (kParts) barrier_wait(&shared.full[ring.stage], ring.parity);
      if (n > 0) release((ring.stage + kStages - 1) % kStages);
      add_slice(sums[1] + 32, parts[1], before);
      begin_slice<0, 4>(parts[1], a, b + (kSliceBytes >> 4));
      wgmma_wait<1>();
      settle(parts[0]);
      add_slice(sums[0], parts[0], factor);
      begin_slice<0, 4>(parts[0], a, b + (2 * kSliceBytes >> 4));
      wgmma_wait<1>();
      settle(parts[1]);
      add_slice(sums[0] + 32, parts[1], factor);
      if constexpr (kParts) begin_slice<0, 2>(parts[1], a, b + (3 * kSliceBytes >> 4));
      begin_slice<kParts ? 2 : 0, 4>(parts[1], a, b + (3 * kSliceBytes >> 4));
      wgmma_wait<kParts ? 2 : 1>();
      settle(parts[0]);
      add_slice(sums[1], parts[0], factor);
      ring.advance();
      if (lag > 0 && (--lag == 0 || n + kCodes >= p.depth)) {
        asm volatile("bar.arrive %0, 256;" ::"n"(kLagBarrier) : "memory");
        lag = 0;
      }
    }
    wgmma_wait<0>();
    settle(parts[1]);
    release((ring.stage + kStages - 1) % kStages);
    add_slice(sums[1] + 32, parts[1], factor);
  }

  // Of the four steps of 32 n, those from kBegin to kEnd.
  template <int kBegin, int kEnd>
  __device__ static void begin_slice(Slice& part, const Fragment (&a)[4], uint64_t b) {
    wgmma_fence();
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) wgmma_codes_n64(part, a[i], b + (i * 32 >> 4), i != 0);
    wgmma_commit();
  }

  __device__ static void add_slice(float* sums, const Slice& part, float factor) {
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
  template <int kBegin, int kEnd>
  __device__ void load_steps(Fragment (&a)[4], const CodesPlace& place) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      load_raw(a[i], place, i);
      permute(a[i], a[i], place.low);
    }
  }

  __device__ void load_raw(Fragment& r, const CodesPlace& place, int step) {
    const uint32_t at = shared_address(shared.weight_at(ring.stage)) + place.offset;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at + step * 32 * kRowBytes)
                 : "memory");
  }

  // Volatile: in place with the waits for products that read `to`.
  __device__ static void permute(Fragment& to, const Fragment& r, uint32_t low) {
    const uint32_t two[4] = {r[0], r[1], r[2], r[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kVariant != kOverlaps) {
        to[i] = __byte_perm(two[i / 2 * 2], two[i / 2 * 2 + 1], low + i % 2 * 0x1111);
        continue;
      }
      asm volatile("prmt.b32 %0, %1, %2, %3;"
                   : "=r"(to[i])
                   : "r"(two[i / 2 * 2]), "r"(two[i / 2 * 2 + 1]), "r"(low + i % 2 * 0x1111));
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
      uint64_t b = operand(shared.dy_at(ring.stage), kPanel);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        uint32_t a[4];
        load_chunk(a, i);
        wgmma_fence();
#pragma unroll
        for (int half = kBegin; half < kEnd; ++half)
          begin_ranks(sums[half - kBegin], a, b + (half * 2 * kPanel >> 4), accumulate);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int half = kBegin; half < kEnd; ++half) settle(sums[half - kBegin]);
        b += kChunk * kRowBytes >> 4;
        accumulate = 1;
      }
      release();
    }
  }

  __device__ static void begin_ranks(Half& sums, const Fragment& a, uint64_t b, int accumulate) {
    if constexpr (kDropout && (kVariant == kSlices || kVariant == kOverlaps)) {
      auto& slices = reinterpret_cast<Slice(&)[2]>(sums);
      wgmma_ranks_n64(slices[0], a, b, accumulate);
      wgmma_ranks_n64(slices[1], a, b + (kPanel >> 4), accumulate);
    } else {
      wgmma_ranks_n128(sums, a, b, accumulate);
    }
  }

  // A^T of the warp's 16 features x 16 ranks, features in the order of load_steps.
  __device__ void load_chunk(uint32_t (&a)[4], int place) {
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

template <bool kBlocks, bool kDropout, int kVariant>
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
    Consumer<kBlocks, kDropout, kVariant>{p, shared, warpgroup}.run();
  }
}

template <bool kBlocks, int kVariant>
int launch(const DgradProblem& problem, int blocks, cudaStream_t stream) {
  constexpr int bytes = sizeof(DgradShared);
  static_assert(bytes <= 232448, "what a block of a Hopper GPU may have");
  if (problem.row_keys == nullptr)
    return launch_kernel<kernel<kBlocks, false, kVariant>>(problem, blocks, kThreads, bytes, 0, stream, kPriority);
  // Dropout leaves the other ways no registers yet.
  return launch_kernel<kernel<kBlocks, true, kHalves>>(problem, blocks, kThreads, bytes, 0, stream, kPriority);
}

template <int kVariant>
int launch(const DgradProblem& problem, int blocks, cudaStream_t stream) {
  if (problem.block_scales == nullptr) return launch<false, kVariant>(problem, blocks, stream);
  return launch<true, kVariant>(problem, blocks, stream);
}

}  // namespace fp8_dgrad
