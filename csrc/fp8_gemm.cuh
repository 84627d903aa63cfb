// out = scaled(codes of x, codes of W) + rank part: the GEMM of lora_gemm.cuh with a base of e4m3 codes.
//
// Semantics, for row m and output column n, with x and W read as the values of their codes:
//   channel: base[m, n] = sum_k (x[m, k] W[n, k]) row_scales[m] column_scales[n]
//   block:   base[m, n] = sum_k (x[m, k] W[n, k] row_scales[m, k / 128] block_scales[n / 128, k / 128])
//   out = base + bias + mask(rank part), the rank part being that of lora_gemm.cuh, in bf16
// Both operands are contiguous along k. The input gradient comes the same way from the codes of dy and of W^T: a kind
// "channel" without column scales, or "block" with the scales of W read in the other direction.
//
// The hardware sums products of 8 bits with about 14 bits and cuts off the rest: over 14,336 products of one sign it loses
// 21 % of the value, 0.56 % in sums of 512 and 0.06 % in sums of 128. So sums of 128 k (a stage of the ring; kPromote: of so
// many) are added, scaled by row or block, to a second set of accumulators in fp32, in ascending order of k. Rank chunks run into
// this set: behind the base and its column scales, or with dropout, which masks them alone, before it. A row's result depends on
// its own codes, its scales and W alone.
//
// A thread holds BN / 2 sums and the products of half a tile of 256 columns, or of a whole narrower one. A unit of its own
// compiles each width (fp8_gemm_*.cu), fp8_gemm.cu checks and chooses.
#pragma once
#include "gemm_tiles.cuh"
#include "wgmma_e4m3.cuh"

namespace fp8 {

using namespace gemm;

constexpr int kCodes = 128;  // of a row in a stage of the ring, and of a block of W's scales
constexpr int kSteps = 4;    // wgmmas that a stage takes
constexpr uint64_t kStep = 32 >> 4;

// Named barrier by which the second warpgroup begins some stages after the first; barriers 0 to 2 are taken.
constexpr int kLagBarrier = 3;

struct Fp8Problem : Problem {
  const float* row_scales;  // [rows], or strided in groups of 128 k
  const float* scales;      // of W: [columns_out] or null, or of 128 x 128 blocks
  // Blocks: elements between rows and between groups of 128 k.
  int row_stride, row_group_stride, column_stride, group_stride;
  // Stages, fewer than the ring's, by which the second warpgroup begins later: so one stores while the other multiplies.
  int lag;
};

__device__ __forceinline__ float load_float(const float* at) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(at));
  return value;
}

// Volatile, or the compiler loads the scales of a tile before its products and has no registers for them.
__device__ __forceinline__ float2 load_shared_two(const float2* at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(shared_address(at)) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_two(float2* at, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared_address(at)), "f"(v.x), "f"(v.y) : "memory");
}

template <int BN, bool kDropout>
struct Producer : Copies<BN> {
  using Copies<BN>::p, Copies<BN>::shared, Copies<BN>::block, Copies<BN>::ring;

  __device__ void run(int first_tile, int step) {
    constexpr int half = BN / 2;  // of W's rows: the other block of the cluster copies the others
    for (int index = first_tile; index < p.row_tiles * p.column_tiles; index += step) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows + block * kBlockRows;
      const int column = tile.column_tile * BN;
      if (kDropout) this->load_chunks(tile, column);
      for (int k = 0; k < p.depth; k += kCodes) {
        uint64_t* full = this->begin_stage(Shared<BN>::kStageBytes);
        load_tile(shared.x[ring.stage], &p.x, full, k, row);
        load_tile_both(shared.weight[ring.stage] + block * half * kCodes, &p.weight, full, k, column + block * half);
        ring.advance();
      }
      if (!kDropout) this->load_chunks(tile, column);
    }
    this->drain();
  }
};

template <int BN, int kPromote, bool kBlock, bool kDropout>
struct Consumer : Sums<BN> {
  using Sums<BN>::p, Sums<BN>::shared, Sums<BN>::warpgroup, Sums<BN>::thread, Sums<BN>::ring, Sums<BN>::previous;
  static constexpr int kParts = BN == 256 ? 2 : 1;
  static constexpr int kPartColumns = BN / kParts;
  static constexpr int kStagesOfSum = kPromote / kCodes;  // 0: the products stay where they are summed
  static_assert(kParts == 1 || kStagesOfSum <= 1, "the halves of a tile take turns in the same registers");
  static_assert(!kBlock || (kStagesOfSum == 1 && kPartColumns == 128), "a block of scales is 128 x 128");

  const Fp8Problem& q;
  // With dropout, chunks come first and may fill the ring; with blocks, registers are short.
  static constexpr bool kLags = !kDropout && !kBlock && kStagesOfSum == 1;
  int lag = kLags ? q.lag : 0;  // that is left

  __device__ void run(int first_tile, int step, int block) {
    float sums[BN / 2];
    if (kLags && lag > 0 && warpgroup == 1 && first_tile < p.row_tiles * p.column_tiles) {
      asm volatile("bar.sync %0, 256;" ::"n"(kLagBarrier) : "memory");
      lag = 0;
    }
    for (int index = first_tile; index < p.row_tiles * p.column_tiles; index += step) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows + block * kBlockRows + warpgroup * 64;
      const int column = tile.column_tile * BN;
      const Chunks chunks(p, tile);
      if constexpr (kStagesOfSum != 0) {
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] = 0.f;
      }
      if constexpr (kDropout) {
        add_chunks(sums, chunks);
        if (chunks.begin < chunks.end) this->drop(sums, row, column);
      }
      const float2 column_scales = scales_of(column + thread * 2);
      multiply(sums, row, column);
      if constexpr (!kDropout) {
        scale(sums, row, column_scales);
        add_chunks(sums, chunks);
      }
      this->store(sums, row, column);
    }
    if (thread == 0) store_wait_all();
  }

  // One chunk after the other, through the registers of the base's products: chunks in one sum of the tensor cores would be
  // divided otherwise with other neighbours, and products of registers that the compiler may have moved are serialized.
  __device__ void add_chunks(float (&sums)[BN / 2], Chunks chunks) {
    if constexpr (kStagesOfSum == 0) {
      if (chunks.begin == chunks.end) return;
      this->multiply_chunks(sums, chunks, 1);
      this->finish();
      return;
    }
    float part[kPartColumns / 2];
    for (int begin = chunks.begin; begin < chunks.end; begin += kStageChunks) {
      const int count = min(kStageChunks, chunks.end - begin);
      barrier_wait(&shared.full[ring.stage], ring.parity);
      uint64_t a = operand(shared.x[ring.stage] + warpgroup * kPanel, kPanel);
      uint64_t b = operand(shared.weight[ring.stage], kPanel);
      for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int place = 0; place < kParts; ++place) {
          settle(part);
          wgmma_fence();
          wgmma<kPartColumns, 1, 1>(part, a, b + place * (kPartColumns / 64 * kPanel >> 4), 0);
          wgmma_commit();
          wgmma_wait<0>();
          settle(part);
          promote(sums, part, place, 1.f, 1.f);
        }
        a += kChunk * 128 >> 4;
        b += kChunk * 128 >> 4;
      }
      this->release(ring.stage);
      ring.advance();
    }
  }

  __device__ void multiply(float (&sums)[BN / 2], int row, int column) {
    if constexpr (kStagesOfSum == 0)
      multiply_unpromoted(sums);
    else if constexpr (kStagesOfSum == 1)
      multiply_stages(sums, row, column);
    else
      multiply_runs(sums, row);
  }

  // The two rows of the accumulators' layout; rows beyond the last are not stored.
  __device__ int row_of(int row, int half) {
    return min(row + thread / 32 * 16 + thread % 32 / 4 + half * 8, p.rows - 1);
  }

  template <int N>
  __device__ void multiply_stage(float (&part)[N / 2], int place, int accumulate) {
    const uint64_t a = operand(shared.x[ring.stage] + warpgroup * kPanel, 0);
    const uint64_t b = operand(shared.weight[ring.stage] + place * N * kCodes, 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) wgmma_e4m3<N>(part, a + i * kStep, b + i * kStep, i > 0 ? 1 : accumulate);
    wgmma_commit();
  }

  // Promotes every stage.
  __device__ void multiply_stages(float (&sums)[BN / 2], int row, int column) {
    float part[kPartColumns / 2];
    const float* of_row[2];
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_row[half] = q.row_scales + row_of(row, half) * static_cast<int64_t>(kBlock ? q.row_stride : 1);
      factor[half] = load_float(of_row[half]);
    }
    const float* of_block = q.scales;
    if constexpr (kBlock) of_block += column / kCodes * static_cast<int64_t>(q.column_stride);
    const int last_block = (p.columns_out - 1) / kCodes - column / kCodes;
    for (int k = 0; k < p.depth; k += kCodes) {
      float of_weight[kParts];
      if constexpr (kBlock) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) of_weight[i] = load_float(of_block + min(i, last_block) * q.column_stride);
#pragma unroll
        for (int half = 0; half < 2; ++half) factor[half] = load_float(of_row[half]);
        of_block += q.group_stride;
        of_row[0] += q.row_group_stride;
        of_row[1] += q.row_group_stride;
      }
      barrier_wait(&shared.full[ring.stage], ring.parity);
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        settle(part);
        multiply_stage<kPartColumns>(part, i, 0);
        wgmma_wait<0>();
        settle(part);
        if (i == kParts - 1) this->release(ring.stage);
        const float w = kBlock ? of_weight[i] : 1.f;
        promote(sums, part, i, factor[0] * w, factor[1] * w);
      }
      ring.advance();
      if (kLags && lag > 0 && (--lag == 0 || k + kCodes >= p.depth)) {
        asm volatile("bar.arrive %0, 256;" ::"n"(kLagBarrier) : "memory");
        lag = 0;
      }
    }
  }

  // Promotes after every so many stages: their products stay in flight.
  __device__ void multiply_runs(float (&sums)[BN / 2], int row) {
    float part[kPartColumns / 2];
    const float first = load_float(q.row_scales + row_of(row, 0)), second = load_float(q.row_scales + row_of(row, 1));
    for (int k = 0; k < p.depth;) {
      settle(part);
      const int end = min(k + kPromote, p.depth);
      for (int accumulate = 0; k < end; k += kCodes, accumulate = 1) {
        barrier_wait(&shared.full[ring.stage], ring.parity);
        multiply_stage<kPartColumns>(part, 0, accumulate);
        next_stage();
      }
      this->finish();
      settle(part);
      promote(sums, part, 0, first, second);
    }
  }

  __device__ void multiply_unpromoted(float (&sums)[BN / 2]) {
    for (int k = 0; k < p.depth; k += kCodes) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      multiply_stage<BN>(sums, 0, k > 0);
      next_stage();
    }
    this->finish();
    settle(sums);
  }

  __device__ void next_stage() {
    wgmma_wait<1>();
    if (previous >= 0) this->release(previous);
    previous = ring.stage;
    ring.advance();
  }

  __device__ void promote(float (&sums)[BN / 2], const float (&part)[kPartColumns / 2], int place, float first,
                          float second) {
#pragma unroll
    for (int i = 0; i < kPartColumns / 2; ++i) {
      float& sum = sums[place * kPartColumns / 2 + i];
      sum = fmaf(part[i], i % 4 < 2 ? first : second, sum);
    }
  }

  // Two columns' for each thread, before the products: they arrive meanwhile.
  __device__ float2 scales_of(int column) {
    if (kBlock || kDropout || q.scales == nullptr) return float2{1.f, 1.f};
    return *reinterpret_cast<const float2*>(q.scales + min(column, p.columns_out - 2));
  }

  // By column, and by row where no promotion has done so. Threads exchange the scales where the tile will be stored from.
  __device__ void scale(float (&sums)[BN / 2], int row, float2 column_scales) {
    if constexpr (kBlock) return;
    float of_row[2] = {1.f, 1.f};
    if constexpr (kStagesOfSum == 0) {
      of_row[0] = load_float(q.row_scales + row_of(row, 0));
      of_row[1] = load_float(q.row_scales + row_of(row, 1));
    } else if (q.scales == nullptr) {
      return;
    }
    auto* scales = reinterpret_cast<float2*>(shared.out[warpgroup][0]);  // a pair of columns
    if (thread == 0) store_wait_read<0>();
    warpgroup_sync(warpgroup);
    store_shared_two(scales + thread, column_scales);
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int eight = 0; eight < BN / 8; ++eight) {
      const float2 s = load_shared_two(scales + eight * 4 + thread % 4);
      float* four = sums + eight * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        four[half * 2] *= of_row[half] * s.x;
        four[half * 2 + 1] *= of_row[half] * s.y;
      }
    }
  }
};

template <int BN, int kPromote, bool kBlock, bool kDropout>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    fp8_gemm(const __grid_constant__ Fp8Problem p) {
  extern __shared__ uint8_t unaligned[];
  auto& shared = aligned_shared<BN>(unaligned);
  const int block = cluster_block();
  start_barriers(shared);
  const int first_tile = blockIdx.x / 2, step = gridDim.x / 2;
  if (!p.overlaps_previous_kernel) wait_for_previous();
  if (threadIdx.x < 128) {
    keep_registers<56>();
    if (threadIdx.x == 0) Producer<BN, kDropout>{{p, shared, block}}.run(first_tile, step);
  } else {
    take_registers<224>();
    const int warpgroup = threadIdx.x / 128 - 1;
    Consumer<BN, kPromote, kBlock, kDropout>{{p, shared, warpgroup, static_cast<int>(threadIdx.x % 128)}, p}.run(
        first_tile, step, block);
  }
}

template <int BN, int kPromote, bool kBlock, bool kDropout>
int launch(const Fp8Problem& problem, int blocks, cudaStream_t stream) {
  return launch_kernel<fp8_gemm<BN, kPromote, kBlock, kDropout>>(problem, blocks, kThreads, sizeof(Shared<BN>) + 1024,
                                                                    0, stream, kPriority);
}

template <int BN>
int launch_width(const Fp8Problem& problem, bool block, int promote, int blocks, cudaStream_t stream) {
  const bool dropout = problem.row_keys != nullptr;
  if (block) {
    if constexpr (BN != 192)
      return dropout ? launch<BN, 128, true, true>(problem, blocks, stream)
                     : launch<BN, 128, true, false>(problem, blocks, stream);
    return fail("tile_columns", "must be 128 or 256 for scales of blocks");
  }
  if (dropout) return launch<BN, 128, false, true>(problem, blocks, stream);
  if (promote == 0) return launch<BN, 0, false, false>(problem, blocks, stream);
  if constexpr (BN != 256)
    if (promote == 512) return launch<BN, 512, false, false>(problem, blocks, stream);
  return launch<BN, 128, false, false>(problem, blocks, stream);
}

}  // namespace fp8
