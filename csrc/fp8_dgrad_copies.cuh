// What a block of fp8_dgrad.cuh holds in shared memory, how threads reach it, and the warp that fills most of it.
#pragma once
#include <cstddef>

#include "gemm_tiles.cuh"

namespace fp8_dgrad {

using namespace gemm;

constexpr int kFeatures = 128;  // of a thread block's tile
constexpr int kClusterFeatures = 2 * kFeatures;
constexpr int kCodes = 128;  // of n in a stage of the ring, and of a block of W's scales
constexpr int kRowBytes = 128;
constexpr int kHalfRows = kTileRows / 2;
constexpr int kSliceRows = 64;
constexpr int kSlices = kTileRows / kSliceRows;
constexpr int kScalesAhead = kStages - 1;  // stages by which a block's scale is copied before it is needed
constexpr int kSliceBytes = kSliceRows * kRowBytes;

// `x` is dy; a tile's columns are features, kClusterFeatures of them.
struct DgradProblem : Problem {
  const float* row_scales;    // [rows]
  const float* block_scales;  // [ceil(depth / 128), ceil(columns_out / 128)]; null: none
};

// W lies where other GEMMs have x, dy where they have W: each block reads its own W, and both read all rows of dy.
struct DgradShared : Shared<kTileRows> {
  float row_scales[2][kTileRows];  // warpgroup

  // Codes [128 n][128 features]; or of lora_a, panels [64 ranks][64 features].
  __device__ uint8_t* weight_at(int stage) { return this->x[stage]; }

  // Codes [256 rows][128 n]; or of ext, panels [64 ranks][64 rows].
  __device__ uint8_t* dy_at(int stage) { return this->weight[stage]; }

  // Of a multiplying warp, a stage each: behind the barriers, where the alignment leaves room.
  __device__ float* block_scales(int warp) { return reinterpret_cast<float*>(this->empty + kStages) + warp * kStages; }
};

static_assert(offsetof(Shared<kTileRows>, empty) + sizeof(Shared<kTileRows>::empty) + 8 * kStages * sizeof(float) <=
                  sizeof(Shared<kTileRows>),
              "scales of blocks must fit behind the barriers");

// 4 bytes into shared memory, later; zero if not `inside`.
__device__ __forceinline__ void copy_word_later(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// For all copies but those of the last kNewer groups.
template <int kNewer>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewer) : "memory");
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Not plain loads: the compiler would move them all to one place, and spill.
__device__ __forceinline__ float2 load_shared_pair(uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ float load_shared_float(uint32_t at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
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
        load_tile_both(shared.dy_at(ring.stage) + block * kHalfRows * kRowBytes, &p.x, full, n, row);
        ring.advance();
      }
      // Dropout masks the chunks' sum by itself, for which there are registers for one slice at a time.
      constexpr int kTogether = kDropout ? 1 : kSlices;
#pragma unroll 1
      for (int slice = 0; slice < kSlices; slice += kTogether) load_chunks(tile, feature, slice, slice + kTogether);
    }
    drain();
  }

  // Of ext, the slices from `begin` to `end`: each is copied by one of the two blocks, for both.
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
      for (int slice = begin; slice < end; ++slice)
        if (slice % 2 == block)
          load_tile_both(shared.dy_at(ring.stage) + slice * kPanel, &p.ext, full, slice * kSliceRows, chunk * kChunk);
      for (int i = 0; i < count; ++i)
        for (int panel = 0; panel < 2; ++panel)
          load_tile(shared.weight_at(ring.stage) + panel * kPanel + i * kChunk * kRowBytes, &p.factors[0], full,
                    feature + panel * 64, p.chunk_rows[chunk + i]);
      ring.advance();
    }
  }
};

}  // namespace fp8_dgrad
