// Gradients of the factors: dA += dS^T drop(x) and dB += dy^T s, sums over an adapter's rows.
//
// Semantics, for rank row j of the item's chunks and feature f of its 128:
//   grad[j, f] += scale sum_t rows[t, j] drop(in[t, f])   over the rows t of the item's run
// with scale 1 / (1 - p). A run's rows are shared by 1 to 8 neighbouring blocks of a cluster, which add their sums
// through each other's shared memory, each for its share of the elements; the runs of a segment are added in order by
// the block that comes last. Both are cut from the segment's own first row: bits do not depend on neighbours, on the
// place in the packing, or on timing.
#include "host.cuh"
#include "rank_ring.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kSharing = 8;  // blocks of a cluster: SHARING of ops/cuda_items.py

struct Problem {
  CUtensorMap in, rows;
  const int* items;
  int item_fields;
  const int64_t* grads;  // address of each arena row's gradient, fp32, over features; 0: a row beyond the rank
  int first_row;         // row of the micro-batch that is row 0 of `in`
  float* workspace;
  int* counters;
  const float* dropout;  // [slots]; null: none
  const int* row_keys;
  int dropout_key, first_column;
};

struct Item {
  int begin, end;        // this block's rows of the micro-batch; -1: no work
  int columns[2];        // of `in`: each warpgroup's first of 64
  int feature;           // of the gradient: the first warpgroup's first; the second's is 64 further
  int width;             // features of the gradient
  int count, rank_column, arena_row, slot;
  int share;             // blocks of the cluster that add up to the run
  int part, parts, workspace, counter;

  __device__ explicit Item(const int* at)
      : begin(at[0]), end(at[1]), columns{at[2], at[3]}, feature(at[4]), width(at[5]), count(at[6]),
        rank_column(at[7]), arena_row(at[8]), slot(at[9]), share(at[10]), part(at[11]), parts(at[12]),
        workspace(at[13]), counter(at[14]) {}

  // Of the accumulators of a kernel for N rank columns, those that this block of the cluster adds up.
  __device__ int elements(int n) const { return n / 2 / share; }
};

__device__ void fill(const Problem& p, const Item& item, int panels, RankRing& ring, Place place) {
  for (int row = item.begin; row < item.end; row += kDepth, place.advance()) {
    uint8_t* to = place.begin_fill(ring);
    uint64_t* full = &ring.full[place.stage];
    for (int i = 0; i < 2; ++i) load_tile(to + i * kPanel, &p.in, full, item.columns[i], row - p.first_row);
    for (int i = 0; i < panels; ++i)
      load_tile(to + (2 + i) * kPanel, &p.rows, full, item.rank_column + i * 64, row);
  }
}

// Adds one accumulator to the gradient. Its place: of every 8 rank columns a thread holds a pair, in features 8 apart.
__device__ __forceinline__ void add(const Problem& p, const Item& item, int i, float value, int thread) {
  const int lane = thread % 32;
  const int rank = i / 4 * 8 + lane % 4 * 2 + i % 2;
  const int feature = item.feature + thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
  if (rank >= item.count * kChunk || feature >= item.width) return;
  float* grad = reinterpret_cast<float*>(p.grads[item.arena_row + rank]);
  if (grad != nullptr) grad[feature] += value;
}

// The run's sums of this block's elements, added over the blocks that share it, into `out` or into the gradient.
template <int N>
__device__ void reduce(const Problem& p, const Item& item, const float* sums, float* out, float scale, int thread) {
  const int block = cluster_block(), base = block & ~(item.share - 1);
  const int count = item.elements(N), first = (block - base) * count;
#pragma unroll 4
  for (int i = first; i < first + count; ++i) {
    float value = 0.f;
    for (int other = 0; other < item.share; ++other)
      value += load_from(sums + i * kMultipliers + thread, base + other);
    if (out != nullptr) {
      __stcg(out + i * kMultipliers + thread, value);
    } else {
      add(p, item, i, scale * value, thread);
    }
  }
}

// Adds this block's elements of all runs of the segment to the gradient, if it is the last of them to come.
template <int N>
__device__ void gather(const Problem& p, const Item& item, const float* parts, float scale, RankRing& ring,
                       int thread) {
  const int member = cluster_block() & (item.share - 1);
  __threadfence();
  multipliers_sync();
  if (thread == 0) {
    int* counter = p.counters + item.counter + member;
    const bool last = atomicAdd(counter, 1) == item.parts - 1;
    if (last) *counter = 0;  // for the next launch
    ring.flag = last;
  }
  multipliers_sync();
  if (!ring.flag) return;
  __threadfence();
  const int count = item.elements(N), first = member * count;
  for (int i = first; i < first + count; ++i) {
    float value = 0.f;
#pragma unroll 8
    for (int part = 0; part < item.parts; ++part)
      value += __ldcg(parts + (static_cast<int64_t>(part) * (N / 2) + i) * kMultipliers + thread);
    add(p, item, i, scale * value, thread);
  }
}

template <int N>
__device__ void finish(const Problem& p, const Item& item, RankRing& ring, int thread) {
  const float* sums = reinterpret_cast<const float*>(ring.bytes);
  const float scale = p.dropout == nullptr ? 1.f : 1.f / (1.f - p.dropout[item.slot]);
  if (item.parts == 1) {
    reduce<N>(p, item, sums, nullptr, scale, thread);
    return;
  }
  float* parts = p.workspace + static_cast<int64_t>(item.workspace) * kMultipliers;
  reduce<N>(p, item, sums, parts + static_cast<int64_t>(item.part) * (N / 2) * kMultipliers, scale, thread);
  gather<N>(p, item, parts, scale, ring, thread);
}

template <typename T, int N, bool kDropout>
__device__ void multiply(const Problem& p, const Item& item, RankRing& ring, Place place, int thread) {
  constexpr int panels = N > 64 ? 2 : 1;
  const int warpgroup = thread / 128;
  float sums[N / 2];
#pragma unroll
  for (float& s : sums) s = 0.f;
  const Mask mask(kDropout ? p.dropout[item.slot] : 0.f);
  int key = 0;
  if (kDropout && item.begin + thread % 128 / 2 < item.end) key = p.row_keys[item.begin + thread % 128 / 2];
  int previous = -1;
  for (int row = item.begin; row < item.end; row += kDepth, place.advance()) {
    barrier_wait(&ring.full[place.stage], place.parity);
    uint8_t* panel = place.at(ring) + warpgroup * kPanel;
    uint8_t* ranks = place.at(ring) + 2 * kPanel;
    const int valid = item.end - row;
    if (kDropout && mask.threshold != 0) {
      const uint32_t pair = (p.first_column + item.columns[warpgroup]) / 2;
      drop_panel(panel, thread % 128, mask, mix32(key ^ p.dropout_key), pair);
      const int next = row + kDepth + thread % 128 / 2;
      if (next < item.end) key = p.row_keys[next];
    }
    if (valid < kDepth) {
      clear_rows(panel, thread % 128, valid);
#pragma unroll
      for (int i = 0; i < panels; ++i) clear_rows(ranks + i * kPanel, thread % 128, valid);
    }
    if (valid < kDepth || (kDropout && mask.threshold != 0)) finish_writes(warpgroup);
    const uint64_t a = operand(panel, kPanel);
    const uint64_t b = operand(ranks, kPanel);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / kChunk; ++i) {
      const uint64_t along = i * (kChunk * 128 >> 4);
      wgmma<T, N, 1, 1>(sums, a + along, b + along, 1);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && thread % 32 == 0) barrier_arrive(&ring.empty[previous]);
    previous = place.stage;
  }
  wgmma_wait<0>();
  // Every copy has landed and every product is read once both warpgroups are here: the ring is free for the sums.
  multipliers_sync();
  float* parts = reinterpret_cast<float*>(ring.bytes);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) parts[i * kMultipliers + thread] = sums[i];
}

template <typename T, bool kDropout>
__global__ void __launch_bounds__(kRankThreads, 2) rank_sums(const __grid_constant__ Problem p) {
  let_next_start();
  const Item item(p.items + static_cast<int64_t>(blockIdx.x) * p.item_fields);
  RankRing& ring = rank_ring();
  init_ring(ring);
  const int thread = threadIdx.x;
  const int panels = item.count > 4 ? 2 : 1;
  const int width = item.begin < 0 ? 0 : kernel_width(item.count);
  const Place place((2 + panels) * kPanel);
  if (thread < kMultipliers) {
    switch (width) {
      case 16: multiply<T, 16, kDropout>(p, item, ring, place, thread); break;
      case 32: multiply<T, 32, kDropout>(p, item, ring, place, thread); break;
      case 64: multiply<T, 64, kDropout>(p, item, ring, place, thread); break;
      case 128: multiply<T, 128, kDropout>(p, item, ring, place, thread); break;
    }
  } else if (width != 0 && thread == kMultipliers) {
    fill(p, item, panels, ring, place);
  }
  __syncwarp();
  cluster_sync();
  if (thread < kMultipliers) {
    switch (width) {
      case 16: finish<16>(p, item, ring, thread); break;
      case 32: finish<32>(p, item, ring, thread); break;
      case 64: finish<64>(p, item, ring, thread); break;
      case 128: finish<128>(p, item, ring, thread); break;
    }
  }
  __syncwarp();
  cluster_sync();  // others may still read this block's sums
  wait_for_previous();
}

template <typename T, bool kDropout>
int launch(const Problem& problem, int items, cudaStream_t stream) {
  return launch_kernel(rank_sums<T, kDropout>, problem, items, kRankThreads, sizeof(RankRing) + 1024, kSharing,
                       stream);
}

}  // namespace

// What the caller passes: `_SumsArguments` of ops/cuda_calls.py, field by field.
struct TloraSums {
  const void *in, *rows;
  const int* items;
  const int64_t* grads;
  float* workspace;
  int* counters;
  const int* row_keys;
  const float* dropout;
  int64_t num_rows, in_rows, in_columns;
  int num_items, item_fields, row_width, first_row, dropout_key, first_column, half_precision, device;
};

TLORA_EXPORT int tlora_sums_size() { return sizeof(TloraSums); }

TLORA_EXPORT int tlora_sums(const TloraSums* arguments, cudaStream_t stream) {
  const TloraSums& g = *arguments;
  if (int failed = prepare(g.device)) return failed;
  Problem p{};
  const bool half_type = g.half_precision != 0;
  if (!make_map(&p.in, half_type, g.in, g.in_rows, g.in_columns, 64) ||
      !make_map(&p.rows, half_type, g.rows, g.num_rows, g.row_width, 64))
    return fail("tensor map", "an operand must be 16-byte aligned in address and row");
  p.items = g.items;
  p.item_fields = g.item_fields;
  p.grads = g.grads;
  p.first_row = g.first_row;
  p.workspace = g.workspace;
  p.counters = g.counters;
  p.dropout = g.dropout;
  p.row_keys = g.row_keys;
  p.dropout_key = g.dropout_key;
  p.first_column = g.first_column;
  if (half_type) return g.dropout ? launch<half, true>(p, g.num_items, stream)
                                  : launch<half, false>(p, g.num_items, stream);
  return g.dropout ? launch<__nv_bfloat16, true>(p, g.num_items, stream)
                   : launch<__nv_bfloat16, false>(p, g.num_items, stream);
}
