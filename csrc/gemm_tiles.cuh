// What persistent Hopper GEMMs share whose K is extended, tile by tile, by the rank chunks of the adapters that have rows
// in the tile (lora_gemm.cuh, fp8_gemm.cuh): their tiles, the ring, the chunks' copies and products, dropout, the store.
//
// A cluster of two blocks computes 256 rows x BN columns: each block 128 rows, sharing W and F by multicast.
// Warpgroup 0 copies (bulk tensor copies into a ring of shared memory), warpgroups 1 and 2 multiply 64 rows
// each. A stage of the ring is 128 bytes deep, whatever the type. ops/lora/tiling.py describes ext and the chunk lists.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "host.cuh"
#include "hopper.cuh"
#include "lora.cuh"
#include "wgmma.cuh"

namespace gemm {

constexpr int kBlockRows = 128;  // rows of a thread block's tile
constexpr int kStageChunks = kDepth / kChunk;
constexpr int kStages = 4;
constexpr int kMaxColumnTiles = 256;
constexpr int kThreads = 384;
constexpr int kWarpsOfCluster = 16;  // that multiply
// That of a nano-batch's own stream (parallel/side_stream.py). From above, the thousands of blocks of a norm there would
// get the multiprocessors of the last clusters, whose tiles would begin when the others end.
constexpr int kPriority = -1;

struct Problem {
  CUtensorMap x, weight, out, ext, factors[kMaxTargets];
  Columns columns[kMaxTargets];
  uint8_t targets[kMaxColumnTiles];  // of a column tile: first | end << 4
  int num_targets;
  int rows, columns_out, depth;
  int row_tiles, column_tiles, group;
  const int* tile_chunks;  // [row_tiles, num_targets + 1]; null: no rank part
  const int* chunk_rows;   // a chunk: its first row in its arena
  const void* bias;
  const int* row_keys;   // [rows], null: no dropout
  const int* row_slots;  // [rows], -1: no adapter
  const float* dropout;  // [slots]
  int dropout_key, first_column;
  int overlaps_previous_kernel;  // x and W were written before the previous kernel started; ext is its work
};

struct Tile {
  int row_tile, column_tile;

  // Groups of row tiles, column by column: neighbours in time share x and W in L2.
  __device__ Tile(const Problem& p, int index) {
    const int group_tiles = p.group * p.column_tiles;
    const int first = index / group_tiles * p.group;
    const int height = min(p.group, p.row_tiles - first);
    const int inside = index % group_tiles;
    row_tile = first + inside % height;
    column_tile = inside / height;
  }
};

struct Chunks {
  int begin, end;

  __device__ Chunks(const Problem& p, const Tile& tile) : begin(0), end(0) {
    if (p.tile_chunks == nullptr) return;
    const int* bounds = p.tile_chunks + tile.row_tile * (p.num_targets + 1);
    const int targets = p.targets[tile.column_tile];
    begin = bounds[targets & 15];
    end = bounds[targets >> 4];
  }
};

// Position in a ring of kLength stages: stage, and the parity of the round.
template <int kLength>
struct RingOf {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kLength) {
      stage = 0;
      parity ^= 1;
    }
  }
};

using Ring = RingOf<kStages>;

// kTurns: panels of 64 columns of the result that a warpgroup may be storing.
template <int BN, int kLength = kStages, int kTurns = 2>
struct Shared {
  static constexpr int kRing = kLength;
  static constexpr int kWeightBytes = BN * 128;
  static constexpr int kStageBytes = 2 * kPanel + kWeightBytes;

  alignas(1024) uint8_t x[kRing][2 * kPanel];
  alignas(1024) uint8_t weight[kRing][kWeightBytes];
  alignas(1024) uint8_t out[2][kTurns][kPanel];  // warpgroup, turn
  uint64_t full[kRing], empty[kRing];
};

// What the copying warp of every GEMM does: the stages of rank chunks. `run` is the GEMM's own.
template <int BN, int kLength = kStages, int kTurns = 2>
struct Copies {
  const Problem& p;
  Shared<BN, kLength, kTurns>& shared;
  const int block;
  RingOf<kLength> ring;
  bool waited = false;  // for the kernel that makes ext
  // Copies of a chunk that the compiler may unroll: none where the ring is not the usual one, as copying warps have
  // fewer registers there.
  static constexpr int kPanelsAtOnce = kLength == kStages && kTurns == 2 ? 4 : 1;

  __device__ uint64_t* begin_stage(int bytes) {
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&shared.full[ring.stage], bytes);
    return &shared.full[ring.stage];
  }

  // Before the block ends: the other block may still copy into this one or arrive here.
  __device__ void drain() {
    if (!waited) wait_for_previous();
    for (int i = 0; i < kLength; ++i, ring.advance()) barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
  }

  __device__ void load_chunks(const Tile& tile, int column) {
    const Chunks chunks(p, tile);
    const int* bounds = p.tile_chunks + tile.row_tile * (p.num_targets + 1);
    int target = 0;
    if (!waited) {
      wait_for_previous();
      let_next_start();
      waited = true;
    }
    for (int begin = chunks.begin; begin < chunks.end; begin += kStageChunks) {
      const int count = min(kStageChunks, chunks.end - begin);
      uint64_t* full = begin_stage(2 * kPanel + count * BN * kChunk * 2);
      for (int half = 0; half < 2; ++half)
        load_tile(shared.x[ring.stage] + half * kPanel, &p.ext, full, block * kBlockRows + half * 64,
                  begin * kChunk);
      for (int i = 0; i < count; ++i) {
        while (p.num_targets > 1 && begin + i >= bounds[target + 1]) ++target;
        load_chunk(full, target, p.chunk_rows[begin + i], i, column);
      }
      ring.advance();
    }
  }

  __device__ void load_chunk(uint64_t* full, int target, int row, int place, int column) {
    // A null table of columns (dgrad) stands for one arena that every target shares.
    const bool one = p.columns[0].stride == 0;
#pragma unroll kPanelsAtOnce
    for (int panel = block; panel < BN / 64; panel += 2) {
      const int n = column + panel * 64;
      const int from = one ? n : compact_column(p.columns[target], n);
      load_tile_both(shared.weight[ring.stage] + panel * kPanel + place * kChunk * 128,
                     &p.factors[one ? 0 : target], full, from, row);
    }
  }
};

// What the multiplying warpgroups of every GEMM do but the base's products: those of rank chunks, dropout, the store.
template <int BN, int kLength = kStages, int kTurns = 2>
struct Sums {
  const Problem& p;
  Shared<BN, kLength, kTurns>& shared;
  const int warpgroup, thread;  // in the warpgroup
  RingOf<kLength> ring;
  int previous = -1;  // the stage whose products may be in flight
  bool waited = false;

  __device__ void release(int stage) {
    const int lane = thread % 32;
    if (lane < 2) barrier_arrive(&shared.empty[stage], lane);
  }

  // One stage's products are in flight while the next is waited for; then the earlier stage is free.
  __device__ void end_stage() {
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0) release(previous);
    previous = ring.stage;
    ring.advance();
  }

  __device__ void finish() {
    wgmma_wait<0>();
    release(previous);
    previous = -1;
  }

  __device__ void multiply_chunks(float (&sums)[BN / 2], Chunks chunks, int accumulate) {
    for (int begin = chunks.begin; begin < chunks.end; begin += kStageChunks) {
      const int count = min(kStageChunks, chunks.end - begin);
      barrier_wait(&shared.full[ring.stage], ring.parity);
      uint64_t a = operand(shared.x[ring.stage] + warpgroup * kPanel, kPanel);
      uint64_t b = operand(shared.weight[ring.stage], kPanel);
      wgmma_fence();
      for (int i = 0; i < count; ++i) {
        wgmma<BN, 1, 1>(sums, a, b, accumulate);
        a += kChunk * 128 >> 4;
        b += kChunk * 128 >> 4;
        accumulate = 1;
      }
      end_stage();
    }
  }

  // The accumulators' layout: warp w holds rows 16 w + lane / 4 (and + 8), of every 8 columns the pair
  // lane % 4: one seed for four pairs.
  __device__ void drop(float (&sums)[BN / 2], int row, int column) {
    const int first = row + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first + half * 8;
      const int slot = r < p.rows ? p.row_slots[r] : -1;
      const Mask mask(slot < 0 ? 0.f : p.dropout[slot]);
      if (mask.dropped == 0) continue;
      const uint32_t key = mix32(p.row_keys[r] ^ p.dropout_key);
      const uint32_t steps = seed_steps(p.first_column + column) + thread % 4 * kSeedStep;
      if (mask.comparable())
        drop_row<true>(sums, half, mask, key, steps);
      else
        drop_row<false>(sums, half, mask, key, steps);
    }
    __syncwarp();
  }

  template <bool kComparable>
  __device__ void drop_row(float (&sums)[BN / 2], int half, Mask mask, uint32_t key, uint32_t steps) {
#pragma unroll
    for (int block = 0; block < BN / kSeedColumns; ++block) {
      const uint32_t seed = seed_of(key, steps + block * 4 * kSeedStep);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* two = sums + (block * 4 + i) * 4 + half * 2;
        mask.apply<kComparable>(pair_bits(seed, i), two[0], two[1]);
      }
    }
  }

  __device__ void store(float (&sums)[BN / 2], int row, int column) {
#pragma unroll
    for (int panel = 0; panel < BN / 64; ++panel) {
      uint8_t* to = shared.out[warpgroup][panel % 2];
      if (thread == 0) store_wait_read<1>();
      warpgroup_sync(warpgroup);
      put_panel(to, sums, panel, column);
      fence_shared_for_copies();
      warpgroup_sync(warpgroup);
      if (thread == 0) {
        if (!waited) wait_for_previous();  // it may still use the memory that is now `out`
        waited = true;
        store_tile(to, &p.out, column + panel * 64, row);
        store_commit();
      }
    }
  }

  // 64 columns of the result, rounded, to shared memory.
  __device__ void put_panel(uint8_t* to, float (&sums)[BN / 2], int panel, int column) {
    const int warp = thread / 32, lane = thread % 32;
    const int matrix_row = warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* s = sums + panel * 32 + i * 8;
      const int at = panel * 64 + i * 16 + thread % 4 * 2;
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[j] = pack(s[2 * j], s[2 * j + 1], column + at + j / 2 * 8);
      const int chunk = (i * 2 + lane / 16) ^ (lane % 8);
      store_matrices(to + matrix_row * 128 + chunk * 16, packed[0], packed[1], packed[2], packed[3]);
    }
  }

  __device__ uint32_t pack(float a, float b, int column) {
    if (p.bias != nullptr && column < p.columns_out) {
      const auto* bias = static_cast<const __nv_bfloat16*>(p.bias) + column;
      a += static_cast<float>(bias[0]);
      b += static_cast<float>(bias[1]);
    }
    return pack_pair(a, b);
  }
};

template <int BN>
__device__ Shared<BN>& aligned_shared(uint8_t* unaligned) {
  return *reinterpret_cast<Shared<BN>*>((reinterpret_cast<uintptr_t>(unaligned) + 1023) & ~1023ull);
}

template <typename Shared>
__device__ void start_barriers(Shared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kRing; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kWarpsOfCluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
}

}  // namespace gemm
