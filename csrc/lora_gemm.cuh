// out = x W + rank part: a persistent Hopper GEMM whose K is extended, tile by tile, by the rank chunks of
// the adapters that have rows in the tile.
//
// Semantics, for row m of row tile t (256 rows) and output column n:
//   out[m, n] = sum_k x[m, k] W[k, n] + bias[n] + mask(sum_c sum_j ext[16 c + j, m % 256] F_c[row_c + j, n])
// over the chunks c of t; dS, and so ext, holds dropout's 1 / (1 - p). `ext` holds zeros in the rows of other adapters,
// so any number of adapters may share a tile. F_c is the arena of the chunk's target; columns that the target does not
// write read as zeros.
// Sums are fp32, over K in ascending order and then the rank chunks (with dropout, which masks their sum alone, the
// chunks come first): a row's result depends on nothing else.
//
// gemm_tiles.cuh says how blocks divide the work. A unit of its own compiles each width (lora_gemm_*.cu), lora_gemm.cu
// checks and chooses.
#pragma once
#include "gemm_tiles.cuh"

namespace gemm {

template <int BN, bool kTransposed, bool kDropout>
struct Producer : Copies<BN> {
  using Copies<BN>::p, Copies<BN>::shared, Copies<BN>::block, Copies<BN>::ring;

  __device__ void run(int first_tile, int step) {
    for (int index = first_tile; index < p.row_tiles * p.column_tiles; index += step) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows + block * kBlockRows;
      const int column = tile.column_tile * BN;
      if (kDropout) this->load_chunks(tile, column);
      for (int k = 0; k < p.depth; k += kDepth) {
        uint64_t* full = this->begin_stage(Shared<BN>::kStageBytes);
        load_tile(shared.x[ring.stage], &p.x, full, k, row);
        load_weight(full, k, column);
        ring.advance();
      }
      if (!kDropout) this->load_chunks(tile, column);
    }
    this->drain();
  }

  __device__ void load_weight(uint64_t* full, int k, int column) {
    uint8_t* to = shared.weight[ring.stage];
    if constexpr (kTransposed) {  // W [N, K]
      constexpr int half = BN / 2;
      load_tile_both(to + block * half * 128, &p.weight, full, k, column + block * half);
    } else {  // W [K, N] in panels of 64 columns
      for (int panel = block; panel < BN / 64; panel += 2)
        load_tile_both(to + panel * kPanel, &p.weight, full, column + panel * 64, k);
    }
  }
};

template <int BN, bool kTransposed, bool kDropout>
struct Consumer : Sums<BN> {
  using Sums<BN>::p, Sums<BN>::shared, Sums<BN>::warpgroup, Sums<BN>::thread, Sums<BN>::ring;

  __device__ void run(int first_tile, int step, int block) {
    float sums[BN / 2];
    for (int index = first_tile; index < p.row_tiles * p.column_tiles; index += step) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows + block * kBlockRows + warpgroup * 64;
      const int column = tile.column_tile * BN;
      const Chunks chunks(p, tile);
      if constexpr (kDropout) {
        const bool any = chunks.begin < chunks.end;
        this->multiply_chunks(sums, chunks, 0);
        if (any) {
          this->finish();
          this->drop(sums, row, column);
        }
        multiply(sums, any);
      } else {
        multiply(sums, 0);
        this->multiply_chunks(sums, chunks, 1);
      }
      this->finish();
      this->store(sums, row, column);
    }
    if (thread == 0) store_wait_all();
  }

  __device__ void multiply(float (&sums)[BN / 2], int accumulate) {
    for (int k = 0; k < p.depth; k += kDepth) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      const uint64_t a = operand(shared.x[ring.stage] + warpgroup * kPanel, 0);
      const uint64_t b = operand(shared.weight[ring.stage], kTransposed ? 0 : kPanel);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kDepth / kChunk; ++i) {
        const uint64_t along_a = i * (kChunk * 2 >> 4);
        const uint64_t along_b = kTransposed ? along_a : i * (kChunk * 128 >> 4);
        wgmma<BN, 0, kTransposed ? 0 : 1>(sums, a + along_a, b + along_b, accumulate);
        accumulate = 1;
      }
      this->end_stage();
    }
  }
};

template <int BN, bool kTransposed, bool kDropout>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    lora_gemm(const __grid_constant__ Problem p) {
  extern __shared__ uint8_t unaligned[];
  auto& shared = aligned_shared<BN>(unaligned);
  const int block = cluster_block();
  start_barriers(shared);
  const int first_tile = blockIdx.x / 2, step = gridDim.x / 2;
  if (!p.overlaps_previous_kernel) wait_for_previous();
  if (threadIdx.x < 128) {
    keep_registers<56>();
    if (threadIdx.x == 0) Producer<BN, kTransposed, kDropout>{{p, shared, block}}.run(first_tile, step);
  } else {
    take_registers<224>();
    const int warpgroup = threadIdx.x / 128 - 1;
    Consumer<BN, kTransposed, kDropout>{{p, shared, warpgroup, static_cast<int>(threadIdx.x % 128)}}.run(
        first_tile, step, block);
  }
}

template <int BN, bool kTransposed, bool kDropout>
int launch(const Problem& problem, int blocks, cudaStream_t stream) {
  return launch_kernel<lora_gemm<BN, kTransposed, kDropout>>(problem, blocks, kThreads, sizeof(Shared<BN>) + 1024, 0,
                                                                stream, kPriority);
}

template <int BN>
int launch_width(const Problem& problem, bool transposed, int blocks, cudaStream_t stream) {
  if (transposed) return launch<BN, true, false>(problem, blocks, stream);
  if (problem.row_keys == nullptr) return launch<BN, false, false>(problem, blocks, stream);
  return launch<BN, false, true>(problem, blocks, stream);
}

}  // namespace gemm
