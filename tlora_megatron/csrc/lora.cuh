// What the kernels share with ops/: sizes, the columns of a target, the dropout hash.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int kTileRows = 256;    // ROW_TILE of ops/tiling.py
constexpr int kChunk = 16;        // RANK_CHUNK of ops/tiling.py: the depth of a wgmma
constexpr int kDepth = 64;        // elements of a swizzled row of 128 bytes
constexpr int kPanel = 64 * 128;  // bytes of 64 such rows
constexpr int kMaxTargets = 4;

struct Columns {  // of one target: OutputColumns of ops/columns.py
  int groups, stride, begin, width;
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

// The mask of ops/dropout.py: one hash a pair of columns, 16 bits a column.
constexpr uint32_t kColumnStep = 0x9E3779B9u;

__device__ __forceinline__ uint32_t mix32(uint32_t h) {
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  return h ^ h >> 16;
}

// Of 65536: a column whose 16 bits are below it is zeroed.
__device__ __forceinline__ uint32_t dropout_threshold(float probability) {
  return static_cast<uint32_t>(probability * 65536.f + 0.5f);
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float a, float b) {
  if constexpr (std::is_same_v<T, half>) {
    const half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}
