// What the rank-sized kernels share: a ring of stages that one warp fills and two warpgroups empty, and the
// dropout of a tile in place.
#pragma once
#include "hopper.cuh"
#include "lora.cuh"

constexpr int kRankThreads = 288;   // warps 0-7 multiply, warp 8 copies
constexpr int kMultipliers = 256;
constexpr int kMaxChunks = 8;       // rank chunks of one block: 128 ranks
constexpr int kRingBytes = 108 << 10;  // two blocks a multiprocessor
constexpr int kMaxStages = 8;

// Rank columns that a kernel computes for so many chunks.
__device__ __forceinline__ int kernel_width(int chunks) {
  return chunks <= 1 ? 16 : chunks <= 2 ? 32 : chunks <= 4 ? 64 : 128;
}

// A barrier among the threads that multiply.
__device__ __forceinline__ void multipliers_sync() { asm volatile("bar.sync 3, 256;" ::: "memory"); }

struct RankRing {
  alignas(1024) uint8_t bytes[kRingBytes];
  uint64_t full[kMaxStages], empty[kMaxStages];
  float* rank_rows[kMaxChunks * kChunk];  // of an item's gradient
  int flag;
};

__device__ __forceinline__ RankRing& rank_ring() {
  extern __shared__ uint8_t unaligned[];
  return *reinterpret_cast<RankRing*>((reinterpret_cast<uintptr_t>(unaligned) + 1023) & ~1023ull);
}

__device__ __forceinline__ void init_ring(RankRing& ring) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxStages; ++i) {
      barrier_init(&ring.full[i], 1);
      barrier_init(&ring.empty[i], kMultipliers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}

// Where a warp stands in the ring; stages are as large as the item needs, so their number differs.
struct Place {
  const int stages, stage_bytes;
  int stage = 0;
  uint32_t parity = 0;

  __device__ explicit Place(int stage_bytes)
      : stages(min(kMaxStages, kRingBytes / stage_bytes)), stage_bytes(stage_bytes) {}

  __device__ uint8_t* at(RankRing& ring) const { return ring.bytes + stage * stage_bytes; }

  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  __device__ uint8_t* begin_fill(RankRing& ring, int bytes) const {
    barrier_wait(&ring.empty[stage], parity ^ 1);
    barrier_expect(&ring.full[stage], bytes);
    return at(ring);
  }
};

// Drops elements of a panel [64 rows, 64 columns], swizzled, by 128 threads, two a row; `steps` are those of the panel's
// first columns. Scaling by 1 / (1 - p) is the caller's.
template <bool kComparable>
__device__ __forceinline__ void drop_panel(uint8_t* panel, int thread, Mask mask, uint32_t key, uint32_t steps) {
  const int row = thread / 2;
  const uint32_t begin = shared_address(panel) + row * 128;
  uint32_t seeds[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) seeds[q] = seed_of(key, steps + (thread % 2 * 4 + q) * kSeedStep);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = begin + ((thread % 2 * 4 + i) ^ row % 8) * 16;
    uint4 v = load_shared(at);
    v.x &= mask.kept<kComparable>(pair_bits(seeds[0], i));
    v.y &= mask.kept<kComparable>(pair_bits(seeds[1], i));
    v.z &= mask.kept<kComparable>(pair_bits(seeds[2], i));
    v.w &= mask.kept<kComparable>(pair_bits(seeds[3], i));
    store_shared(at, v);
  }
}

__device__ __forceinline__ void drop_panel(uint8_t* panel, int thread, Mask mask, uint32_t key, uint32_t steps) {
  if (mask.comparable())
    drop_panel<true>(panel, thread, mask, key, steps);
  else
    drop_panel<false>(panel, thread, mask, key, steps);
}

// Zeros the rows of a panel from `first` on: rows of another adapter may hold anything, NaN too.
__device__ __forceinline__ void clear_rows(uint8_t* panel, int thread, int first) {
  const int row = thread / 2;
  if (row < first) return;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *reinterpret_cast<uint4*>(panel + row * 128 + ((thread % 2 * 4 + i) ^ row % 8) * 16) = uint4{};
}

// After ordinary writes to a stage, before tensor cores read it.
__device__ __forceinline__ void finish_writes(int warpgroup) {
  __syncwarp();
  fence_shared_for_copies();
  warpgroup_sync(warpgroup);
}
