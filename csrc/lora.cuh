// What the kernels share with ops/: sizes, the columns of a target, the dropout mask.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int kTileRows = 256;    // ROW_TILE of ops/lora/tiling.py
constexpr int kChunk = 16;        // RANK_CHUNK of ops/lora/tiling.py: the depth of a wgmma
constexpr int kDepth = 64;        // elements of a swizzled row of 128 bytes
constexpr int kPanel = 64 * 128;  // bytes of 64 such rows
constexpr int kMaxTargets = 4;

struct Columns {  // of one target: OutputColumns of ops/lora/linear_ops.py
  int groups, stride, begin, width;
};

struct Factors {  // arenas [rows, width] as the caller passes them: `Factors` of ops/lora/cuda_arguments.py
  const void* at[kMaxTargets];
  int64_t rows[kMaxTargets], width[kMaxTargets];
  Columns columns[kMaxTargets];  // a target's; all zeros: one arena over all columns, whatever the target
};

// The place of an output column in its target's arena; beyond the arena, where reads are zeros, if the target
// does not own it.
__device__ __forceinline__ int compact_column(const Columns& c, int column) {
  const int inside = column % c.stride - c.begin;
  const bool owned = inside >= 0 && inside < c.width;
  return owned ? column / c.stride * c.width + inside : c.groups * c.width;
}

// The inverse: the output column of a place in the arena.
__device__ __forceinline__ int output_column(const Columns& c, int place) {
  return place / c.width * c.stride + c.begin + place % c.width;
}

// The mask of ops/dropout.py. In a block of 32 columns, seed q serves the pairs 8 i + 2 q: what thread q of four holds
// of a tensor core's result. A column's 16 bits stand at place 0xFC00 - bits, modulo 2^16; the first places are dropped.
constexpr int kSeedColumns = 32;
constexpr uint32_t kSeedStep = 0x9E3779B9u;
constexpr uint32_t kLowest = 0xFC00FC00u;  // -inf, twice

__device__ __forceinline__ uint32_t mix32(uint32_t h) {
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  return h ^ h >> 16;
}

// What the seeds of a block of columns add to their row's key; seed q adds q kSeedStep more.
__device__ __forceinline__ uint32_t seed_steps(int column) { return column / kSeedColumns * 4 * kSeedStep; }

__device__ __forceinline__ uint32_t seed_of(uint32_t key, uint32_t steps) {
  const uint32_t h = (key ^ steps) * 0x85EBCA6Bu;
  return h ^ h >> 16;
}

// 16 bits for each column of pair i of a seed.
__device__ __forceinline__ uint32_t pair_bits(uint32_t seed, int i) {
  return seed * (i == 0 ? 0xEF40188Bu : i == 1 ? 0xAB87D1A5u : i == 2 ? 0xBF9DD3E7u : 0xDFFAE703u);
}

struct Mask {
  uint32_t dropped;  // places of 65536; 0: nothing is dropped

  // As half floats, places count up from -inf through the negative numbers: up to so many places (and with room to the
  // numbers that hardware may take for zero), one comparison with the first number that stays decides on a pair.
  static constexpr uint32_t kMostComparable = 0x7800;

  __device__ explicit Mask(float probability)
      : dropped(min(static_cast<uint32_t>(probability * 65536.f + 0.5f), 0xFFFFu)) {}

  __device__ bool comparable() const { return dropped <= kMostComparable; }

  __device__ uint32_t first_kept() const { return (0xFC00u - dropped) * 0x10001u; }

  // Ones in the halves that stay.
  template <bool kComparable>
  __device__ uint32_t kept(uint32_t bits) const {
    if constexpr (kComparable) {
      uint32_t mask;  // a NaN has a late place: it stays
      asm("set.geu.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(bits), "r"(first_kept()));
      return mask;
    } else {
      return __vcmpgeu2(__vsub2(kLowest, bits), dropped * 0x10001u);
    }
  }

  // The same of two values that stand apart.
  template <bool kComparable>
  __device__ void apply(uint32_t bits, float& even, float& odd) const {
    if constexpr (kComparable) {
      asm("{\n.reg .pred low, high;\n"
          "setp.geu.f16x2 low|high, %2, %3;\n"
          "selp.f32 %0, %0, 0f00000000, low;\n"
          "selp.f32 %1, %1, 0f00000000, high;\n}\n"
          : "+f"(even), "+f"(odd)
          : "r"(bits), "r"(first_kept()));
    } else {
      const uint32_t mask = kept<false>(bits);
      even = mask & 0xFFFFu ? even : 0.f;
      odd = mask >> 16 ? odd : 0.f;
    }
  }
};

__device__ __forceinline__ uint32_t pack_pair(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
