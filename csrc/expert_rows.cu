// Rows of adapters on routed experts: s = scaling * x M^T over the rows of each (expert, adapter), in one launch.
//
// M are the adapter's rank rows at the expert, of A or of B as it is stored. A block takes a tile: 64 rows of one pair,
// all of whose rank rows it multiplies at once, 128 at most. Rows of x may lie elsewhere than rows of s: those of a
// micro-batch that meet several experts are read where they lie once, mostly from the L2 cache. What a row becomes
// depends on nothing but the row and its adapter.
#include <cuda_bf16.h>

#include "expert_mma.cuh"
#include "host.cuh"

// What the caller passes: `ExpertRowsArguments` of ops/lora/cuda/arguments.py, field by field.
struct TloraExpertRows {
  const void* x;
  const int64_t* rows;  // of x, for each row of s; null: the same row
  const int* tiles;     // expert (-1: none), slot, first row and end
  const int64_t* places;
  const int* widths;
  const float* scaling;
  const int* positions;  // first rank column of each slot in `wide`
  void *s, *wide;        // wide, zeros before, gets the same at other columns
  int64_t depth;
  int num_tiles, slots, width, wide_width, device;
};

namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 4;  // of a multiprocessor
constexpr int kTileRows = 64;  // TILE_ROWS of ops/experts/triton/tiles.py
constexpr int kTileFields = 4;
constexpr int kMostRanks = 128;

// Of blocks that multiply `kRanks` rank rows at once.
template <int kRanks>
struct Shape {
  static constexpr int ranks = kRanks;
  static constexpr int depth = kRanks == 128 ? 32 : 64;  // columns of a stage
  static constexpr int pieces = depth / 8;
  static constexpr int row_step = kThreads / pieces;  // rows between two of a thread
  static constexpr int x_bytes = kTileRows * depth * 2;
  static constexpr int stage_bytes = x_bytes + ranks * depth * 2;
  static constexpr int stages = kRanks == 16 ? 5 : kRanks == 64 ? 3 : 4;
};

constexpr int kRingBytes = Shape<16>::stages * Shape<16>::stage_bytes;
static_assert(kRingBytes >= Shape<32>::stages * Shape<32>::stage_bytes, "stages must fit");
static_assert(kRingBytes >= Shape<64>::stages * Shape<64>::stage_bytes, "stages must fit");
static_assert(kRingBytes >= Shape<128>::stages * Shape<128>::stage_bytes, "stages must fit");

struct Tile {
  int expert, slot, begin, end;
};

// What a thread copies: its pieces of some rows of x and of some rank rows.
template <typename S>
struct Copies {
  static constexpr int rows = kTileRows / S::row_step, rank_rows = S::ranks / S::row_step;
  const __nv_bfloat16 *x[rows], *ranks[rank_rows];  // column 0; null: there is no row
  int begin[rank_rows], end[rank_rows];             // columns of rank rows
  int row, piece;                                   // the thread's first one, and its piece of each stage

  __device__ Copies(const TloraExpertRows& p, const Tile& tile, int first)
      : row(threadIdx.x / S::pieces), piece(threadIdx.x % S::pieces) {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int at = tile.begin + row + i * S::row_step;
      const int64_t from = at >= tile.end || p.rows == nullptr ? at : p.rows[at];
      x[i] = at < tile.end ? static_cast<const __nv_bfloat16*>(p.x) + from * p.depth : nullptr;
    }
    const int64_t plane = static_cast<int64_t>(p.slots) * p.width;
#pragma unroll
    for (int i = 0; i < rank_rows; ++i) {
      const int rank = first + row + i * S::row_step;
      ranks[i] = nullptr;
      begin[i] = end[i] = 0;
      if (rank < p.width) {
        const int64_t* at = p.places + tile.slot * p.width + rank;
        ranks[i] = reinterpret_cast<const __nv_bfloat16*>(at[0] + tile.expert * at[plane]);
        begin[i] = static_cast<int>(at[2 * plane]);
        end[i] = static_cast<int>(at[3 * plane]);
      }
    }
  }

  __device__ void fill(const TloraExpertRows& p, uint32_t stage, int number) const {
    const int column = number * S::depth + piece * 8;
    const uint32_t to = stage + swizzled<S::pieces>(row, piece);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const bool exists = x[i] != nullptr && column < p.depth;
      copy16(to + i * S::row_step * S::depth * 2, exists ? x[i] + column : p.x, exists);
    }
#pragma unroll
    for (int i = 0; i < rank_rows; ++i) {
      const bool exists = column >= begin[i] && column < end[i];
      copy16(to + S::x_bytes + i * S::row_step * S::depth * 2, exists ? ranks[i] + column : p.x, exists);
    }
  }
};

__device__ __forceinline__ void store_pair(void* at, float a, float b) {
  *static_cast<__nv_bfloat162*>(at) = __floats2bfloat162_rn(a, b);
}

template <int kRanks>
__device__ void compute(const TloraExpertRows& p, const Tile& tile, uint32_t ring, int own_width, int first) {
  using S = Shape<kRanks>;
  const int thread = threadIdx.x, lane = thread % 32;
  const int num_steps = (static_cast<int>(p.depth) + S::depth - 1) / S::depth;
  const Copies<S> copies(p, tile, first);
#pragma unroll
  for (int number = 0; number < S::stages - 1; ++number) {
    if (number < num_steps) copies.fill(p, ring + number * S::stage_bytes, number);
    commit_copies();
  }
  float sums[kRanks / 8][4] = {};
  // Of the operands: the row of 8x8 matrices that this lane names, and their columns.
  const int x_row = thread / 32 * 16 + lane % 16, x_column = lane / 16;
  const int rank_row = lane / 16 * 8 + lane % 8, rank_column = lane / 8 % 2;
  for (int number = 0; number < num_steps; ++number) {
    wait_copies<S::stages - 2>();
    __syncthreads();
    const int ahead = number + S::stages - 1;
    if (ahead < num_steps) copies.fill(p, ring + ahead % S::stages * S::stage_bytes, ahead);
    commit_copies();
    const uint32_t stage = ring + number % S::stages * S::stage_bytes;
#pragma unroll
    for (int k = 0; k < S::depth / 16; ++k) {
      uint32_t a[4];
      load_matrices(a, stage + swizzled<S::pieces>(x_row, k * 2 + x_column));
#pragma unroll
      for (int n = 0; n < kRanks / 8; n += 2) {
        uint32_t b[4];
        load_matrices(b, stage + S::x_bytes + swizzled<S::pieces>(n * 8 + rank_row, k * 2 + rank_column));
        multiply(sums[n], a, b[0], b[1]);
        multiply(sums[n + 1], a, b[2], b[3]);
      }
    }
  }
  const float scale = p.scaling[tile.slot];
  const int filled = (own_width + 15) / 16 * 16, wide_filled = (own_width + 7) / 8 * 8;
  const int position = p.positions[tile.slot];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile.begin + thread / 32 * 16 + half * 8 + lane / 4;
    if (row >= tile.end) continue;
    auto* s = static_cast<__nv_bfloat16*>(p.s) + static_cast<int64_t>(row) * p.width;
    auto* wide = static_cast<__nv_bfloat16*>(p.wide) + static_cast<int64_t>(row) * p.wide_width + position;
#pragma unroll
    for (int n = 0; n < kRanks / 8; ++n) {
      const int rank = first + n * 8 + lane % 4 * 2;
      const float a = sums[n][2 * half] * scale, b = sums[n][2 * half + 1] * scale;
      if (rank < filled) store_pair(s + rank, a, b);
      if (rank < wide_filled) store_pair(wide + rank, a, b);
    }
  }
}

__global__ void __launch_bounds__(kThreads, kBlocks) expert_rows(const __grid_constant__ TloraExpertRows p) {
  extern __shared__ uint8_t memory[];
  const uint32_t ring = (shared_address(memory) + 127) & ~127u;
  wait_for_previous();
  let_next_start();
  const int* at = p.tiles + static_cast<int64_t>(blockIdx.x) * kTileFields;
  const Tile tile{at[0], at[1], at[2], at[3]};
  if (tile.expert < 0 || tile.slot >= p.slots) return;
  const int own_width = p.widths[tile.slot];
  for (int first = 0; first < own_width; first += kMostRanks) {
    if (first > 0) __syncthreads();  // all have read the stages
    const int left = own_width - first;
    if (left <= 16)
      compute<16>(p, tile, ring, own_width, first);
    else if (left <= 32)
      compute<32>(p, tile, ring, own_width, first);
    else if (left <= 64)
      compute<64>(p, tile, ring, own_width, first);
    else
      compute<128>(p, tile, ring, own_width, first);
  }
}

}  // namespace

TLORA_EXPORT int tlora_expert_rows_size() { return sizeof(TloraExpertRows); }

TLORA_EXPORT int tlora_expert_rows(const TloraExpertRows* arguments, cudaStream_t stream) {
  const TloraExpertRows& g = *arguments;
  if (g.num_tiles == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  return launch_kernel<expert_rows>(g, g.num_tiles, kThreads, kRingBytes + 128, 0, stream);
}
