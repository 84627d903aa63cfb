// Gradients of adapters on routed experts: grad += s^T values over the rows of each (expert, adapter), in one launch.
//
// A block takes one entry of an expert: 16, 32 or 64 rank rows of one adapter by 512, 256 or 128 columns. It goes
// through the adapter's rows there from the first to the last, onto what the gradient holds: a gradient's bits depend
// on nothing but the job's own rows, and each element has one block. A row of s may name another row of `values` than
// its own: rows of a micro-batch that lie there once, and meet several experts, stay in the L2 cache.
//
// What takes time are the gradients, 8 bytes an element, and three reads one behind the other until the first of them
// is known. A block has 64 accumulators a thread, so that four of them share a multiprocessor and cover each other's.
#include <cuda_bf16.h>

#include "hopper.cuh"
#include "host.cuh"

// What the caller passes: `ExpertSumsArguments` of ops/lora/cuda/arguments.py, field by field.
struct TloraExpertSums {
  const void *values, *s;
  const int64_t* rows;  // of `values`, for each row of s; null: the same row
  const int *begins, *entries, *widths;
  const int64_t* places;
  int64_t depth;
  int num_entries, experts, columns, width, device;
};

namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 4;      // of a multiprocessor
constexpr int kEntryFields = 4;  // slot, first rank row, first column, number of 16 rank rows

// Of blocks with 16 `kTiles` rank rows.
template <int kTiles>
struct Shape {
  static constexpr int ranks = 16 * kTiles;
  static constexpr int warp_columns = 128 / kTiles;
  static constexpr int columns = 4 * warp_columns;
  static constexpr int step = kTiles == 4 ? 32 : 16;  // rows of a stage
  static constexpr int stages = kTiles == 1 ? 3 : 4;
  static constexpr int value_bytes = step * columns * 2;
  static constexpr int rank_bytes = step * ranks * 2;
  static constexpr int stage_bytes = value_bytes + rank_bytes;
};

constexpr int kRingBytes = Shape<1>::stages * Shape<1>::stage_bytes;
static_assert(kRingBytes >= Shape<2>::stages * Shape<2>::stage_bytes, "stages must fit");
static_assert(kRingBytes >= Shape<4>::stages * Shape<4>::stage_bytes, "stages must fit");

struct RankRow {
  int64_t address;  // of column 0 of the gradient
  int begin, end;   // columns that it has
};

struct Shared {
  alignas(128) uint8_t ring[kRingBytes];
  RankRow ranks[64];
  int rows[5 * 32];  // of `values`, for the stages under way and the next one
};

// The 16 bytes `piece` of a row of `kPieces`, so that 8 neighbours of a column lie in different banks.
template <int kPieces>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  constexpr int rows = kPieces >= 8 ? 1 : 8 / kPieces;  // that 128 bytes hold
  return (row * kPieces + (piece ^ (row / rows % (kPieces >= 8 ? 8 : kPieces)))) * 16;
}

__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8x8 matrices, each transposed on the way.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Work {
  int begin, end;     // rows
  int first, filled;  // rank rows: the block's first one, and how many of the slot s has values or zeros for
  int column;
};

template <int kTiles>
__device__ void fill(const TloraExpertSums& p, const Work& work, Shared& shared, int number) {
  using S = Shape<kTiles>;
  const uint32_t stage = shared_address(shared.ring) + number % S::stages * S::stage_bytes;
  const int row = work.begin + number * S::step;
  constexpr int pieces = S::columns / 8;
#pragma unroll
  for (int i = threadIdx.x; i < S::step * pieces; i += kThreads) {
    const int local = i / pieces, piece = i % pieces;
    const bool exists = row + local < work.end && work.column + piece * 8 < p.depth;
    const int from = shared.rows[number % (S::stages + 1) * S::step + local];
    const auto* at = static_cast<const __nv_bfloat16*>(p.values);
    if (exists) at += from * p.depth + work.column + piece * 8;
    copy16(stage + swizzled<pieces>(local, piece), at, exists);
  }
  constexpr int rank_pieces = S::ranks / 8;
#pragma unroll
  for (int i = threadIdx.x; i < S::step * rank_pieces; i += kThreads) {
    const int local = i / rank_pieces, piece = i % rank_pieces;
    const bool exists = row + local < work.end && work.first + piece * 8 < work.filled;
    const auto* at = static_cast<const __nv_bfloat16*>(p.s);
    if (exists) at += static_cast<int64_t>(row + local) * p.width + work.first + piece * 8;
    copy16(stage + S::value_bytes + swizzled<rank_pieces>(local, piece), at, exists);
  }
}

// The row of `values` of a row of the pair.
__device__ __forceinline__ int source_row(const TloraExpertSums& p, const Work& work, int row) {
  return p.rows == nullptr || row >= work.end ? row : static_cast<int>(p.rows[row]);
}

// Where a thread's pair of columns lies in a row of the gradient, and which of them there are.
__device__ __forceinline__ float* place(const RankRow& rank, int column, bool& both, bool& second) {
  second = column + 1 >= rank.begin && column + 1 < rank.end;
  const bool first = column >= rank.begin && column < rank.end;
  both = first && second;
  return first || second ? reinterpret_cast<float*>(rank.address) + column : nullptr;
}

template <int kTiles>
__device__ void add_block(const TloraExpertSums& p, const Work& work, Shared& shared, int slot, int expert) {
  using S = Shape<kTiles>;
  const int thread = threadIdx.x, lane = thread % 32;
  const int num_steps = (work.end - work.begin + S::step - 1) / S::step;
  if (thread < S::ranks) {
    const int rank = work.first + thread, plane = (p.columns - 1) * p.width;
    RankRow found{};
    if (rank < p.width) {
      const int64_t* at = p.places + slot * p.width + rank;
      found = {at[0] + expert * at[plane], static_cast<int>(at[2 * plane]), static_cast<int>(at[3 * plane])};
    }
    shared.ranks[thread] = found;
  }
  if (thread < S::stages * S::step) shared.rows[thread] = source_row(p, work, work.begin + thread);
  __syncthreads();
#pragma unroll
  for (int number = 0; number < S::stages - 1; ++number) {
    if (number < num_steps) fill<kTiles>(p, work, shared, number);
    commit_copies();
  }
  const int warp_column = thread / 32 * S::warp_columns;
  constexpr int tiles = S::warp_columns / 8;
  float sums[kTiles][tiles][4];
  const auto for_gradient = [&](auto touch) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RankRow rank = shared.ranks[m * 16 + half * 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
          bool both, second;
          float* at = place(rank, work.column + warp_column + n * 8 + lane % 4 * 2, both, second);
          touch(at, both, second, sums[m][n][2 * half], sums[m][n][2 * half + 1]);
        }
      }
  };
  for_gradient([](const float* at, bool both, bool second, float& a, float& b) {
    a = b = 0.f;
    if (both) {
      const float2 old = __ldcg(reinterpret_cast<const float2*>(at));
      a = old.x;
      b = old.y;
    } else if (at != nullptr) {
      (second ? b : a) = __ldcg(at + second);
    }
  });
  // Of the operands: the row of 8x8 matrices that this lane names, and their columns.
  const int rank_row = lane / 16 * 8 + lane % 8, rank_column = lane / 8 % 2;
  const int value_row = lane / 8 % 2 * 8 + lane % 8, value_column = lane / 16;
  for (int number = 0; number < num_steps; ++number) {
    wait_copies<S::stages - 2>();
    __syncthreads();
    const int ahead = number + S::stages;
    if (ahead - 1 < num_steps) fill<kTiles>(p, work, shared, ahead - 1);
    commit_copies();
    int next = 0;
    if (thread < S::step) next = source_row(p, work, work.begin + ahead * S::step + thread);
    const uint32_t stage = shared_address(shared.ring) + number % S::stages * S::stage_bytes;
#pragma unroll
    for (int k = 0; k < S::step; k += 16) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
        load_transposed(a[m], stage + S::value_bytes + swizzled<S::ranks / 8>(k + rank_row, m * 2 + rank_column));
#pragma unroll
      for (int n = 0; n < tiles; n += 2) {
        uint32_t b[4];
        load_transposed(b, stage + swizzled<S::columns / 8>(k + value_row, warp_column / 8 + n + value_column));
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          multiply(sums[m][n], a[m], b[0], b[1]);
          multiply(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
    // Read by `fill` behind the next barrier.
    if (thread < S::step) shared.rows[ahead % (S::stages + 1) * S::step + thread] = next;
  }
  for_gradient([](float* at, bool both, bool second, float& a, float& b) {
    if (both) {
      __stcg(reinterpret_cast<float2*>(at), make_float2(a, b));
    } else if (at != nullptr) {
      __stcg(at + second, second ? b : a);
    }
  });
}

__global__ void __launch_bounds__(kThreads, kBlocks) expert_sums(const __grid_constant__ TloraExpertSums p) {
  extern __shared__ uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(memory) + 127) & ~uintptr_t{127});
  wait_for_previous();
  let_next_start();
  const int expert = blockIdx.x / p.num_entries;
  const int* entry = p.entries + blockIdx.x % p.num_entries * kEntryFields;
  const int slot = entry[0], pair = expert * p.columns + slot;
  const int filled = (p.widths[slot] + 15) / 16 * 16;
  const Work work{p.begins[pair], p.begins[pair + 1], entry[1], filled, entry[2]};
  if (work.begin >= work.end) return;
  switch (entry[3]) {
    case 1: add_block<1>(p, work, shared, slot, expert); break;
    case 2: add_block<2>(p, work, shared, slot, expert); break;
    default: add_block<4>(p, work, shared, slot, expert);
  }
}

}  // namespace

TLORA_EXPORT int tlora_expert_sums_size() { return sizeof(TloraExpertSums); }

TLORA_EXPORT int tlora_expert_sums(const TloraExpertSums* arguments, cudaStream_t stream) {
  const TloraExpertSums& g = *arguments;
  if (g.num_entries == 0 || g.experts == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  return launch_kernel<expert_sums>(g, g.num_entries * g.experts, kThreads, sizeof(Shared) + 128, 0, stream);
}
