// Gradients of adapters on routed experts: grad += s^T values over the rows of each (expert, adapter), in one launch.
//
// A block takes one entry of an expert: 16, 32 or 64 rank rows of one adapter by 512 to 128 columns. It goes
// through the adapter's rows there from the first to the last, onto what the gradient holds: a gradient's bits depend
// on nothing but the job's own rows, and each element has one block. A row of s may name another row of `values` than
// its own: rows of a micro-batch that lie there once, and meet several experts, stay in the L2 cache.
//
// What takes time are the gradients, 8 bytes an element, and three reads one behind the other until the first of them
// is known. A block has 64 accumulators a thread, so that four of them share a multiprocessor and cover each other's.
#include <cuda_bf16.h>

#include "hopper.cuh"
#include "host.cuh"

// What the caller passes: `ExpertSumsArguments` of ops/lora/cuda_arguments.py, field by field.
struct TloraExpertSums {
  const void *values, *s;
  const int64_t* rows;  // of `values`, for each row of s; null: the same row
  const int *begins, *entries;
  const int64_t* places;
  int64_t depth;
  int num_entries, experts, columns, width, device;
};

namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 4;  // of a multiprocessor

// One of `entries`.
struct alignas(16) Entry {
  int slot, first, column;  // its first rank row and column
  int filled;               // rank rows of the slot for which s has values or zeros
  int ranks, columns, unused[2];
};

// Of blocks of 16 `kTiles` rank rows by `kColumns`.
template <int kTiles, int kColumns>
struct Shape {
  static constexpr int ranks = 16 * kTiles;
  static constexpr int columns = kColumns;
  static constexpr int warp_columns = columns / 4;
  static constexpr int step = kTiles == 4 ? 32 : 16;  // rows of a stage
  static constexpr int stages = columns == 512 ? 3 : 4;
  static constexpr int value_bytes = step * columns * 2;
  static constexpr int rank_bytes = step * ranks * 2;
  static constexpr int stage_bytes = value_bytes + rank_bytes;
};

using Widest = Shape<1, 512>;
constexpr int kRingBytes = Widest::stages * Widest::stage_bytes;

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

// Zeros where the source does not exist; its address must be one that may be named.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8x8 matrices, a row of one at each lane's address, each transposed on the way.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// Adds a product of 16 x 16 and 16 x 8.
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Work {
  int begin, end;  // rows
  Entry entry;
};

template <typename S>
__device__ void fill(const TloraExpertSums& p, const Work& work, Shared& shared, int number) {
  const uint32_t stage = shared_address(shared.ring) + number % S::stages * S::stage_bytes;
  const int row = work.begin + number * S::step;
  // A thread's rows are 8 apart and its pieces 16, so that all of its places are one and a constant.
  constexpr int pieces = S::columns / 8;
  const int own_row = threadIdx.x / 16, own_piece = threadIdx.x % 16;
  const uint32_t to = stage + swizzled<pieces>(own_row, own_piece);
  const auto* values = static_cast<const __nv_bfloat16*>(p.values) + work.entry.column + own_piece * 8;
  const int columns = static_cast<int>(p.depth) - work.entry.column - own_piece * 8;
#pragma unroll
  for (int i = 0; i < S::step; i += 8) {
    const bool live = row + own_row + i < work.end;
    const int64_t from = live ? shared.rows[number % (S::stages + 1) * S::step + own_row + i] : 0;
    const auto* at = values + from * p.depth;
#pragma unroll
    for (int j = 0; j < pieces; j += 16) {
      const bool exists = live && j * 8 < columns;
      copy16(to + (i * pieces + j) * 16, exists ? at + j * 8 : values, exists);
    }
  }
  constexpr int rank_pieces = S::ranks / 8;
#pragma unroll
  for (int i = 0; i < S::step * rank_pieces; i += kThreads) {
    const int local = (i + threadIdx.x) / rank_pieces, piece = (i + threadIdx.x) % rank_pieces;
    if (local >= S::step) break;
    const bool exists = row + local < work.end && work.entry.first + piece * 8 < work.entry.filled;
    const auto* at = static_cast<const __nv_bfloat16*>(p.s);
    if (exists) at += static_cast<int64_t>(row + local) * p.width + work.entry.first + piece * 8;
    copy16(stage + S::value_bytes + swizzled<rank_pieces>(local, piece), at, exists);
  }
}

// The row of `values` of a row of the pair.
__device__ __forceinline__ int source_row(const TloraExpertSums& p, const Work& work, int row) {
  return p.rows == nullptr || row >= work.end ? row : static_cast<int>(p.rows[row]);
}

// Calls `touch` with each pair of a thread's sums and where it lies in the gradient, or null where it has no place, and
// `part`: 0 both lie there, 1 the first alone, 2 the second alone.
template <typename S, int kTiles, int kTilesWide, typename Touch>
__device__ __forceinline__ void for_gradient(const Shared& shared, int first_column, bool whole,
                                             float (&sums)[kTiles][kTilesWide][4], Touch touch) {
  const int lane = threadIdx.x % 32;
  const int column = first_column + threadIdx.x / 32 * S::warp_columns + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RankRow& rank = shared.ranks[m * 16 + half * 8 + lane / 4];
      float* row = reinterpret_cast<float*>(rank.address) + column;
      if (whole) {
        if (rank.address != 0) {
#pragma unroll
          for (int n = 0; n < kTilesWide; ++n) touch(row + n * 8, 0, sums[m][n][2 * half], sums[m][n][2 * half + 1]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kTilesWide; ++n) {
          const int at = column + n * 8;
          const bool first = at >= rank.begin && at < rank.end, second = at + 1 >= rank.begin && at + 1 < rank.end;
          if (first || second)
            touch(row + n * 8, first ? second ? 0 : 1 : 2, sums[m][n][2 * half], sums[m][n][2 * half + 1]);
        }
      }
    }
}

template <int kTiles, int kColumns>
__device__ void add_block(const TloraExpertSums& p, const Work& work, Shared& shared, int expert) {
  using S = Shape<kTiles, kColumns>;
  const int thread = threadIdx.x, lane = thread % 32;
  const Entry& entry = work.entry;
  const int num_steps = (work.end - work.begin + S::step - 1) / S::step;
  bool fits = true;
  if (thread < S::ranks) {
    const int rank = entry.first + thread, plane = (p.columns - 1) * p.width;
    RankRow found{};
    if (rank < p.width) {
      const int64_t* at = p.places + entry.slot * p.width + rank;
      found = {at[0] + expert * at[plane], static_cast<int>(at[2 * plane]), static_cast<int>(at[3 * plane])};
    }
    const int column = entry.column, end = entry.column + S::columns;
    if (found.begin >= end || found.end <= column) found.address = 0;
    fits = found.address == 0 || (found.begin <= column && found.end >= end);
    shared.ranks[thread] = found;
  }
  if (thread < S::stages * S::step) shared.rows[thread] = source_row(p, work, work.begin + thread);
  const bool whole = __syncthreads_and(fits);
#pragma unroll
  for (int number = 0; number < S::stages - 1; ++number) {
    if (number < num_steps) fill<S>(p, work, shared, number);
    commit_copies();
  }
  constexpr int tiles = S::warp_columns / 8;
  float sums[kTiles][tiles][4] = {};
  for_gradient<S>(shared, entry.column, whole, sums, [](const float* at, int part, float& a, float& b) {
    if (part == 0) {
      const float2 old = __ldcs(reinterpret_cast<const float2*>(at));
      a = old.x;
      b = old.y;
    } else {
      (part == 1 ? a : b) = __ldcs(at + part - 1);
    }
  });
  // Of the operands: the row of 8x8 matrices that this lane names, and their columns.
  const int rank_row = lane / 16 * 8 + lane % 8, rank_column = lane / 8 % 2;
  const int value_row = lane / 8 % 2 * 8 + lane % 8, value_column = thread / 32 * tiles + lane / 16;
  for (int number = 0; number < num_steps; ++number) {
    wait_copies<S::stages - 2>();
    __syncthreads();
    const int ahead = number + S::stages;
    if (ahead - 1 < num_steps) fill<S>(p, work, shared, ahead - 1);
    commit_copies();
    int next = 0;
    const bool goes_on = ahead < num_steps && thread < S::step;
    if (goes_on) next = source_row(p, work, work.begin + ahead * S::step + thread);
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
        load_transposed(b, stage + swizzled<S::columns / 8>(k + value_row, n + value_column));
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          multiply(sums[m][n], a[m], b[0], b[1]);
          multiply(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
    // Read by `fill` behind the next barrier.
    if (goes_on) shared.rows[ahead % (S::stages + 1) * S::step + thread] = next;
  }
  for_gradient<S>(shared, entry.column, whole, sums, [](float* at, int part, float& a, float& b) {
    if (part == 0)
      __stcs(reinterpret_cast<float2*>(at), make_float2(a, b));
    else
      __stcs(at + part - 1, part == 1 ? a : b);
  });
}

__global__ void __launch_bounds__(kThreads, kBlocks) expert_sums(const __grid_constant__ TloraExpertSums p) {
  extern __shared__ uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(memory) + 127) & ~uintptr_t{127});
  wait_for_previous();
  let_next_start();
  const int expert = blockIdx.x / p.num_entries;
  Work work;
  work.entry = reinterpret_cast<const Entry*>(p.entries)[blockIdx.x % p.num_entries];
  const int pair = expert * p.columns + work.entry.slot;
  work.begin = p.begins[pair];
  work.end = p.begins[pair + 1];
  if (work.begin >= work.end) return;
  switch (work.entry.ranks) {
    case 16:
      if (work.entry.columns == 512)
        add_block<1, 512>(p, work, shared, expert);
      else
        add_block<1, 256>(p, work, shared, expert);
      break;
    case 32: add_block<2, 256>(p, work, shared, expert); break;
    default: add_block<4, 128>(p, work, shared, expert);
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
