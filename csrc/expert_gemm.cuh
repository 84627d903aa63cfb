// out = x W_e^T or x W_e, + rank part, for rows that lie expert by expert: a persistent Hopper GEMM whose K is extended,
// unit by unit, by the rank columns of the adapters that have rows there.
//
// Semantics, for row m of expert e and output column n:
//   out[m, n] = sum_k x[m, k] W_e[n, k] + sum_j s[m, j] F[e R + j, n]
// over the R rank columns of all adapters. s holds zeros in the columns of other adapters than the row's, so any number of
// adapters may share a unit. Sums are fp32, over K in ascending order and then the rank columns: a row's result depends on
// nothing else.
//
// How many rows an expert has is known on the device alone. ops/experts/cuda.py writes the list of units there: 256
// rows of one expert by BN columns, or, where at most 128 rows are left, 128 rows by 2 BN columns. A cluster of two blocks
// computes a unit; its blocks share W and F in the first form, and x and s in the second.
#pragma once
#include "gemm_tiles.cuh"

namespace gemm {

constexpr int kUnitFields = 8;  // UNIT_FIELDS of ops/experts/cuda.py

struct ExpertProblem : Problem {
  CUtensorMap s;
  __nv_bfloat16* out_rows;
  const int* units;      // [*num_units, kUnitFields]
  const int* num_units;  // on the device
  int weight_rows;       // of an expert
  int rank_rows;         // of an expert in its factors; 0: no rank part
};

// expert, first row, the row behind the last, 2 column tile + form; then for each half of 128 rows the rank columns
// [low, high) of the adapters that have rows there.
struct Unit {
  int expert, row, end, column;
  bool is_pair;  // of row blocks
  int4 ranks;

  __device__ Unit(const ExpertProblem& p, int index, int BN) {
    const int4* fields = reinterpret_cast<const int4*>(p.units + index * kUnitFields);
    const int4 head = fields[0];
    ranks = fields[1];
    expert = head.x, row = head.y, end = head.z;
    is_pair = (head.w & 1) == 0;
    column = (head.w >> 1) * BN;
  }
};

// Steps of 64 rank columns that a unit reads: from `begin`, aligned, to `end`.
struct RankSteps {
  int begin, end;

  __device__ RankSteps(const ExpertProblem& p, int4 ranks) {
    const bool first = ranks.x < ranks.y, second = ranks.z < ranks.w;
    begin = (first ? ranks.x : ranks.z) / kDepth * kDepth;
    end = second ? ranks.w : ranks.y;
    if (p.rank_rows == 0 || (!first && !second)) end = begin;
  }
};

template <int BN, bool kTransposed>
struct ExpertProducer {
  const ExpertProblem& p;
  Shared<BN>& shared;
  const int block;
  Ring ring;

  __device__ void run(int first_unit, int step) {
    const int count = *p.num_units;
    for (int index = first_unit; index < count; index += step) {
      const Unit unit(p, index, BN);
      const int column = unit.column + (unit.is_pair ? 0 : block * BN);
      for (int k = 0; k < p.depth; k += kDepth) {
        uint64_t* full = begin_stage();
        load_rows(full, &p.x, k, unit);
        load_weight(full, k, column, unit);
        ring.advance();
      }
      const RankSteps steps(p, unit.ranks);
      for (int k = steps.begin; k < steps.end; k += kDepth) {
        uint64_t* full = begin_stage();
        load_rows(full, &p.s, k, unit);
        load_panels(full, &p.factors[0], column, unit.expert * p.rank_rows + k, unit.is_pair);
        ring.advance();
      }
    }
    // Before the block ends: the other block may still copy into this one or arrive here.
    for (int i = 0; i < kStages; ++i, ring.advance()) barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
  }

  __device__ uint64_t* begin_stage() {
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&shared.full[ring.stage], Shared<BN>::kStageBytes);
    return &shared.full[ring.stage];
  }

  // 128 rows: this block's own, or the same ones for both blocks, each of which fetches half of them.
  __device__ void load_rows(uint64_t* full, const CUtensorMap* map, int k, const Unit& unit) {
    uint8_t* to = shared.x[ring.stage];
    if (unit.is_pair) {
      const int row = unit.row + block * kBlockRows;
      load_tile(to, map, full, k, row);
      load_tile(to + kPanel, map, full, k, row + 64);
    } else {
      load_tile_both(to + block * kPanel, map, full, k, unit.row + block * 64);
    }
  }

  __device__ void load_weight(uint64_t* full, int k, int column, const Unit& unit) {
    const int first_row = unit.expert * p.weight_rows;
    if constexpr (kTransposed) {  // W [experts N, K]
      constexpr int half = BN / 2;
      uint8_t* to = shared.weight[ring.stage];
      if (unit.is_pair) {
        load_tile_both(to + block * half * 128, &p.weight, full, k, first_row + column + block * half);
      } else {
        load_tile(to, &p.weight, full, k, first_row + column);
        load_tile(to + half * 128, &p.weight, full, k, first_row + column + half);
      }
    } else {  // W [experts K, N]
      load_panels(full, &p.weight, column, first_row + k, unit.is_pair);
    }
  }

  // 64 rows of BN columns, in panels of 64 columns.
  __device__ void load_panels(uint64_t* full, const CUtensorMap* map, int column, int row, bool is_pair) {
    uint8_t* to = shared.weight[ring.stage];
    if (is_pair) {
      for (int panel = block; panel < BN / 64; panel += 2)
        load_tile_both(to + panel * kPanel, map, full, column + panel * 64, row);
    } else {
      for (int panel = 0; panel < BN / 64; ++panel)
        load_tile(to + panel * kPanel, map, full, column + panel * 64, row);
    }
  }
};

template <int BN, bool kTransposed>
struct ExpertConsumer : Sums<BN> {
  using Sums<BN>::shared, Sums<BN>::warpgroup, Sums<BN>::thread, Sums<BN>::ring;
  const ExpertProblem& e;

  __device__ void run(int first_unit, int step, int block) {
    const int count = *e.num_units;
    float sums[BN / 2];
    for (int index = first_unit; index < count; index += step) {
      const Unit unit(e, index, BN);
      const int row = unit.row + (unit.is_pair ? block * kBlockRows : 0) + warpgroup * 64;
      const int column = unit.column + (unit.is_pair ? 0 : block * BN);
      int accumulate = 0;
      for (int k = 0; k < e.depth; k += kDepth, accumulate = 1) multiply(sums, accumulate);
      const bool second = unit.is_pair && block == 1;
      const int low = second ? unit.ranks.z : unit.ranks.x, high = second ? unit.ranks.w : unit.ranks.y;
      const RankSteps steps(e, unit.ranks);
      for (int k = steps.begin; k < steps.end; k += kDepth) multiply_ranks(sums, low - k, high - k);
      this->finish();
      store_rows(sums, row, column, unit.end - row);
    }
    if (thread == 0) store_wait_all();
  }

  __device__ void multiply(float (&sums)[BN / 2], int accumulate) {
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

  // The products of a stage's rank columns [low, high), in chunks of 16.
  __device__ void multiply_ranks(float (&sums)[BN / 2], int low, int high) {
    const int begin = max(low, 0) / kChunk, end = (min(high, kDepth) + kChunk - 1) / kChunk;
    barrier_wait(&shared.full[ring.stage], ring.parity);
    uint64_t a = operand(shared.x[ring.stage] + warpgroup * kPanel, 0) + begin * (kChunk * 2 >> 4);
    uint64_t b = operand(shared.weight[ring.stage], kPanel) + begin * (kChunk * 128 >> 4);
    wgmma_fence();
    for (int i = begin; i < end; ++i) {
      wgmma<BN, 0, 1>(sums, a, b, 1);
      a += kChunk * 2 >> 4;
      b += kChunk * 128 >> 4;
    }
    this->end_stage();
  }

  // Whole blocks of 64 rows go out by the copy engine, which would overwrite the next expert's where there are fewer.
  __device__ void store_rows(float (&sums)[BN / 2], int row, int column, int live) {
#pragma unroll
    for (int panel = 0; panel < BN / 64; ++panel) {
      uint8_t* from = shared.out[warpgroup][panel % 2];
      if (thread == 0) {  // where threads store, no copy comes between those before and this panel's
        if (live < 64) store_wait_read<0>();
        store_wait_read<1>();
      }
      warpgroup_sync(warpgroup);
      this->put_panel(from, sums, panel, column);
      fence_shared_for_copies();
      warpgroup_sync(warpgroup);
      if (live < 64) {
        store_some(from, row, column + panel * 64, live);
      } else if (thread == 0) {
        store_tile(from, &e.out, column + panel * 64, row);
        store_commit();
      }
    }
  }

  // The first `live` rows of a panel, by the threads.
  __device__ void store_some(const uint8_t* from, int row, int column, int live) {
    const int r = thread / 2, n = column + thread % 2 * 32;
    __nv_bfloat16* to = e.out_rows + static_cast<int64_t>(row + r) * e.columns_out + n;
    const uint32_t at = shared_address(from) + r * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 values = load_shared(at + ((thread % 2 * 4 + i) ^ r % 8) * 16);
      if (r < live && n + i * 8 < e.columns_out) *reinterpret_cast<uint4*>(to + i * 8) = values;
    }
  }
};

template <int BN, bool kTransposed>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    expert_gemm(const __grid_constant__ ExpertProblem p) {
  extern __shared__ uint8_t unaligned[];
  auto& shared = aligned_shared<BN>(unaligned);
  const int block = cluster_block();
  start_barriers(shared);
  const int first_unit = blockIdx.x / 2, step = gridDim.x / 2;
  wait_for_previous();
  if (threadIdx.x < 128) {
    keep_registers<56>();
    if (threadIdx.x == 0) ExpertProducer<BN, kTransposed>{p, shared, block}.run(first_unit, step);
  } else {
    take_registers<224>();
    const int warpgroup = threadIdx.x / 128 - 1;
    ExpertConsumer<BN, kTransposed>{{p, shared, warpgroup, static_cast<int>(threadIdx.x % 128), {}, -1, true}, p}.run(
        first_unit, step, block);
  }
}

}  // namespace gemm
