// Rank-sized rows from wide ones: s = scaling drop(x) A^T and dS = scaling dy B.
//
// Semantics, for row t of the item's segment and rank row j of its chunks:
//   out[t, j] = scaling[slot] sum_k drop(in[t, column(k)]) F[j, k]
// over the places k of the target's arena F. Written twice: transposed into ext, [chunk 16, 256] a chunk, with
// zeros in rows of other adapters (what lora_gemm.cu reads), and as rows (what rank_sums.cu reads).
//
// Two ways. Spread: a cluster computes 128 rows; its blocks share k and sum their parts, in order of blocks, through
// each other's shared memory: the shortest time for this kernel alone. Beside: few persistent blocks, one a
// multiprocessor, go through the items while the GEMM that follows begins on the others; it needs ext only at the end
// of its first tiles. Waiting for memory then costs few multiprocessors' time instead of all.
#include "host.cuh"
#include "rank_ring.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kBlockRows = 128;

struct Problem {
  CUtensorMap in, factors[kMaxTargets];
  Columns columns[kMaxTargets];  // of the input that each target reads; stride 0: all of them
  int depth[kMaxTargets];        // places of each target's arena
  const int* items;
  int item_fields;
  const int* chunks;  // ext chunks, pair by pair
  void *ext, *rows;
  int row_width;
  int beside, num_items, max_count;
  const float *scaling, *dropout;  // [slots]; dropout null: none
  const int* row_keys;
  int dropout_key, first_column;
};

struct Item {
  int row, begin, end;  // of the block and of the segment
  int tile_column;      // the block's first column in ext
  int target, slot, count, factor_row, first_chunk, rank_column;

  __device__ explicit Item(const int* at)
      : row(at[0]), begin(at[1]), end(at[2]), tile_column(at[3]), target(at[4]), slot(at[5]), count(at[6]),
        factor_row(at[7]), first_chunk(at[8]), rank_column(at[9]) {}

  __device__ bool owns(int t) const { return t >= begin && t < end; }
  __device__ bool any() const { return begin < row + kBlockRows && end > row; }
};

struct Range {  // of steps of 64 places that a block sums
  int begin, end;

  __device__ Range(int depth, int part, int parts) {
    const int steps = (depth + kDepth - 1) / kDepth;
    begin = steps * part / parts;
    end = steps * (part + 1) / parts;
  }
};

__device__ void fill(const Problem& p, const Item& item, Range range, RankRing& ring, Place& place) {
  const Columns& columns = p.columns[item.target];
  for (int step = range.begin; step < range.end; ++step, place.advance()) {
    uint8_t* to = place.begin_fill(ring, 2 * kPanel + item.count * kChunk * 128);
    const int k = step * kDepth;
    const int column = columns.stride == 0 ? k : output_column(columns, k);
    load_tile(to, &p.in, &ring.full[place.stage], column, item.row);
    for (int i = 0; i < item.count; ++i)
      load_tile(to + 2 * kPanel + i * kChunk * 128, &p.factors[item.target], &ring.full[place.stage], k,
                item.factor_row + i * kChunk);
  }
}

// Writes a pair of rank columns of one row: the accumulators 2 q and 2 q + 1 of a thread.
template <typename T>
__device__ __forceinline__ void write_pair(const Problem& p, const Item& item, int q, float a, float b, int thread) {
  const int lane = thread % 32;
  const int column = q / 2 * 8 + lane % 4 * 2;
  const int local = thread / 32 * 16 + lane / 4 + q % 2 * 8;
  if (column >= item.count * kChunk) return;
  const int t = item.row + local;
  const bool inside = item.owns(t);
  const uint32_t packed = inside ? pack_pair<T>(a, b) : 0;
  if (inside)
    *reinterpret_cast<uint32_t*>(static_cast<T*>(p.rows) + static_cast<int64_t>(t) * p.row_width + item.rank_column +
                                 column) = packed;
  const int chunk = p.chunks[item.first_chunk + column / kChunk];
  uint16_t* to = static_cast<uint16_t*>(p.ext) +
                 (static_cast<int64_t>(chunk) * kChunk + column % kChunk) * kTileRows + item.tile_column + local;
  to[0] = static_cast<uint16_t>(packed);
  to[kTileRows] = static_cast<uint16_t>(packed >> 16);
}

__device__ __forceinline__ float scale_of(const Problem& p, const Item& item) {
  return p.scaling[item.slot] / (1.f - (p.dropout == nullptr ? 0.f : p.dropout[item.slot]));
}

template <typename T, int N, bool kDropout>
__device__ __forceinline__ void multiply(const Problem& p, const Item& item, Range range, RankRing& ring, Place& place, int thread,
                         float (&sums)[N / 2]) {
  const int warpgroup = thread / 128;
  uint32_t key = 0;
  Mask mask(0.f);
  if constexpr (kDropout) {
    mask = Mask(p.dropout[item.slot]);
    const int t = item.row + thread / 2;
    key = item.owns(t) ? mix32(p.row_keys[t] ^ p.dropout_key) : 0;
    __syncwarp();
  }
  int previous = -1;
  for (int step = range.begin; step < range.end; ++step, place.advance()) {
    barrier_wait(&ring.full[place.stage], place.parity);
    uint8_t* panel = place.at(ring) + warpgroup * kPanel;
    if (kDropout && mask.threshold != 0) {
      drop_panel(panel, thread % 128, mask, key, (p.first_column + step * kDepth) / 2);
      finish_writes(warpgroup);
    }
    const uint64_t a = operand(panel, 0);
    const uint64_t b = operand(place.at(ring) + 2 * kPanel, 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / kChunk; ++i) {
      const uint64_t along = i * (kChunk * 2 >> 4);
      wgmma<T, N, 0, 0>(sums, a + along, b + along, i > 0 || step > range.begin);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && thread % 32 == 0) barrier_arrive(&ring.empty[previous]);
    previous = place.stage;
  }
  wgmma_wait<0>();
  if (thread % 32 == 0) barrier_arrive(&ring.empty[previous]);
}

// One item of a persistent block.
template <typename T, int N, bool kDropout>
__device__ void run_item(const Problem& p, const Item& item, Range range, RankRing& ring, Place& place, int thread) {
  if (range.begin == range.end) {
    for (int q = 0; q < N / 4; ++q) write_pair<T>(p, item, q, 0.f, 0.f, thread);
    return;
  }
  float sums[N / 2];
  multiply<T, N, kDropout>(p, item, range, ring, place, thread, sums);
  const float scale = scale_of(p, item);
#pragma unroll
  for (int q = 0; q < N / 4; ++q) {
    write_pair<T>(p, item, q, sums[2 * q] * scale, sums[2 * q + 1] * scale, thread);
    asm volatile("" ::: "memory");  // or the compiler keeps all pairs' addresses at once
  }
}

// This block's part of an item, left in shared memory.
template <typename T, int N, bool kDropout>
__device__ void run_part(const Problem& p, const Item& item, Range range, RankRing& ring, Place& place, int thread) {
  float* parts = reinterpret_cast<float*>(ring.bytes());
  if (range.begin == range.end) {
    for (int i = 0; i < N / 2; ++i) parts[i * kMultipliers + thread] = 0.f;
    return;
  }
  float sums[N / 2];
  multiply<T, N, kDropout>(p, item, range, ring, place, thread, sums);
  // Every copy has landed and every product is read once both warpgroups are here: the ring is free for the sums.
  multipliers_sync();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) parts[i * kMultipliers + thread] = sums[i];
}

// Every parts-th pair of columns, added over the blocks of the cluster.
template <typename T>
__device__ void join_parts(const Problem& p, const Item& item, int width, int part, int parts, RankRing& ring,
                           int thread) {
  const float scale = scale_of(p, item);
  const float* sums = reinterpret_cast<const float*>(ring.bytes());
  for (int q = part; q < width / 4; q += parts) {
    float two[2] = {0.f, 0.f};
    for (int block = 0; block < parts; ++block)
      for (int e = 0; e < 2; ++e) two[e] += load_from(sums + (2 * q + e) * kMultipliers + thread, block);
    write_pair<T>(p, item, q, two[0] * scale, two[1] * scale, thread);
  }
}

template <typename T, bool kDropout, bool kPart>
__device__ void run(const Problem& p, const Item& item, int width, Range range, RankRing& ring, Place& place,
                    int thread) {
#define TLORA_RUN(N)                                                     \
  if constexpr (kPart) {                                                 \
    run_part<T, N, kDropout>(p, item, range, ring, place, thread);       \
  } else {                                                               \
    run_item<T, N, kDropout>(p, item, range, ring, place, thread);       \
  }                                                                      \
  break
  switch (width) {
    case 16: TLORA_RUN(16);
    case 32: TLORA_RUN(32);
    case 64: TLORA_RUN(64);
    default: TLORA_RUN(128);
  }
#undef TLORA_RUN
}

template <typename T, bool kDropout>
__device__ void run_spread(const Problem& p) {
  const int part = cluster_block(), parts = cluster_size();
  const int* at = p.items + static_cast<int64_t>(blockIdx.x / parts) * p.item_fields;
  if (at[0] < 0) return;
  const Item item(at);
  RankRing& ring = rank_ring();
  const int thread = threadIdx.x;
  const int width = kernel_width(item.count);
  if (item.any()) {
    init_ring(ring);
    const Range range(p.depth[item.target], part, parts);
    Place place(2 * kPanel + width * 128, kRingBytes);  // rows beyond the chunks are read, and go nowhere
    if (thread < kMultipliers) {
      run<T, kDropout, true>(p, item, width, range, ring, place, thread);
    } else if (thread == kMultipliers) {
      fill(p, item, range, ring, place);
    }
  } else if (thread < kMultipliers) {
    float* sums = reinterpret_cast<float*>(ring.bytes());
    for (int i = 0; i < width / 2; ++i) sums[i * kMultipliers + thread] = 0.f;
  }
  __syncwarp();
  cluster_sync();
  if (thread < kMultipliers) join_parts<T>(p, item, width, part, parts, ring, thread);
  __syncwarp();
  cluster_sync();  // others may still read this block's parts
}

template <typename T, bool kDropout>
__device__ void run_beside(const Problem& p) {
  RankRing& ring = rank_ring();
  init_ring(ring);
  const int thread = threadIdx.x;
  Place place(2 * kPanel + kernel_width(p.max_count) * 128, kLargeRingBytes);
  for (int index = blockIdx.x; index < p.num_items; index += gridDim.x) {
    const int* at = p.items + static_cast<int64_t>(index) * p.item_fields;
    if (at[0] < 0) break;
    const Item item(at);
    Range range(p.depth[item.target], 0, 1);
    if (!item.any()) range.end = 0;
    if (thread < kMultipliers) {
      run<T, kDropout, false>(p, item, kernel_width(item.count), range, ring, place, thread);
    } else if (thread == kMultipliers) {
      fill(p, item, range, ring, place);
    }
  }
}

template <typename T, bool kDropout>
__global__ void __launch_bounds__(kRankThreads, 2) rank_rows_spread(const __grid_constant__ Problem p) {
  wait_for_previous();
  let_next_start();
  run_spread<T, kDropout>(p);
}

template <typename T, bool kDropout>
__global__ void __launch_bounds__(kRankThreads, 1) rank_rows_beside(const __grid_constant__ Problem p) {
  wait_for_previous();
  let_next_start();
  run_beside<T, kDropout>(p);
}

template <typename T, bool kDropout>
int launch(const Problem& problem, int items, int parts, cudaStream_t stream) {
  if (problem.beside)  // in pairs, as the GEMM's clusters need the rest in pairs
    return launch_kernel(rank_rows_beside<T, kDropout>, problem, problem.beside, kRankThreads,
                         shared_bytes(kLargeRingBytes), 2, stream);
  return launch_kernel(rank_rows_spread<T, kDropout>, problem, items * parts, kRankThreads, shared_bytes(kRingBytes),
                       parts, stream);
}

}  // namespace

// What the caller passes: `_RowsArguments` of ops/cuda_calls.py, field by field.
struct TloraRows {
  const void *in, *factors[kMaxTargets];
  void *ext, *rows;
  const int *items, *chunks, *row_keys;
  const float *scaling, *dropout;
  int64_t num_rows, in_columns, factor_rows[kMaxTargets], depth[kMaxTargets];
  Columns columns[kMaxTargets];
  int num_targets, num_items, item_fields, parts, beside, max_count, row_width, dropout_key, first_column, half_precision, device;
};

TLORA_EXPORT int tlora_rows_size() { return sizeof(TloraRows); }

TLORA_EXPORT int tlora_rows(const TloraRows* arguments, cudaStream_t stream) {
  const TloraRows& g = *arguments;
  if (int failed = prepare(g.device)) return failed;
  Problem p{};
  const bool half_type = g.half_precision != 0;
  bool made = make_map(&p.in, half_type, g.in, g.num_rows, g.in_columns, kBlockRows);
  for (int i = 0; i < g.num_targets; ++i) {
    made = made && make_map(&p.factors[i], half_type, g.factors[i], g.factor_rows[i], g.depth[i], kChunk);
    p.columns[i] = g.columns[i];
    p.depth[i] = static_cast<int>(g.depth[i]);
  }
  if (!made) return fail("tensor map", "an operand must be 16-byte aligned in address and row");
  p.items = g.items;
  p.item_fields = g.item_fields;
  p.chunks = g.chunks;
  p.ext = g.ext;
  p.rows = g.rows;
  p.row_width = g.row_width;
  p.beside = g.beside;
  p.num_items = g.num_items;
  p.max_count = g.max_count;
  p.scaling = g.scaling;
  p.dropout = g.dropout;
  p.row_keys = g.row_keys;
  p.dropout_key = g.dropout_key;
  p.first_column = g.first_column;
  if (half_type) return g.dropout ? launch<half, true>(p, g.num_items, g.parts, stream)
                                  : launch<half, false>(p, g.num_items, g.parts, stream);
  return g.dropout ? launch<__nv_bfloat16, true>(p, g.num_items, g.parts, stream)
                   : launch<__nv_bfloat16, false>(p, g.num_items, g.parts, stream);
}
