// Gradients of the factors: dA += dS^T mask(x) and dB += s^T dy, sums over an adapter's rows, in one launch.
//
// Semantics, for rank row j of the item's chunks and feature f of its 128:
//   grad[j, f] += sum_t rows[t, j] mask(in[t, f])   over the rows t of the item's run
// `in` and `rows` are x and dS, which holds 1 / (1 - p), or dy and s without a mask. Runs are cut from the portion's own
// first row, and the runs of a segment are added in order by the block that comes last: bits do not depend on
// neighbours, on the place in the packing, or on timing. The gradient takes the sums of a segment's portions one after
// the other, `(grad + first) + second`, as from micro-batches that hold one each.
//
// Blocks are persistent: the copying warp is ahead of the multiplying ones, beyond the end of an item, so that memory
// never waits. Where one run is all of a segment, the gradient comes and goes through the same ring.
//
// Only dS may be the previous kernel's work, so items of dy and s begin while that kernel ends. Gradients and parts of
// sums are touched after it has ended: it may be a launch of this kernel that works on the same ones.
#include "host.cuh"
#include "rank_ring.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kStageBytes = 4 * kPanel;
constexpr int kGradRows = 32;           // rows of a gradient in a stage
constexpr int kGradStride = 132 * 4;    // bytes of 128 features and some: neighbours lie in different banks
constexpr int kGradAddresses = kGradRows * kGradStride;  // where a stage holds the rows' addresses

enum Kind { kDown, kUp, kKinds };  // DOWN and UP of ops/lora/cuda_work_items.py: dA from x and dS, dB from dy and s

struct Problem {
  CUtensorMap in[kKinds], rows[kKinds];
  const int* items;
  // Counter by counter, where the borders of its segment begin and end in this very table: the first part of every
  // portion but the segment's first. Null: no segment has several portions.
  const int* borders;
  int num_items, item_fields;
  const int64_t* grads[kKinds];  // address of each arena row's gradient, fp32, over features; 0: beyond the rank
  int first_row;                 // row of the micro-batch that is row 0 of x
  float* workspace;
  int* counters;
  const float* dropout;  // [slots]; null: none
  const int* row_keys;
  int dropout_key, first_column;
  int overlaps_previous_kernel;  // dy and s were written before the previous kernel started
};

struct Item {
  int begin, end;        // rows of the micro-batch; begin -1: no more items
  int columns[2];        // of `in`: each warpgroup's first of 64
  int feature;           // of the gradient: the first warpgroup's first; the second's is 64 further
  int width;             // features of the gradient
  int count, rank_column, arena_row, slot;
  int part, parts, workspace, counter;
  int kind;

  __device__ explicit Item(const int* at)
      : begin(at[0]), end(at[1]), columns{at[2], at[3]}, feature(at[4]), width(at[5]), count(at[6]),
        rank_column(at[7]), arena_row(at[8]), slot(at[9]), part(at[10]), parts(at[11]),
        workspace(at[12]), counter(at[13]), kind(at[14]) {}
};

// Runs through this block's items. They come longest first, so every other round goes through the blocks backwards:
// who had the longest of one has the shortest of the next.
template <typename Work>
__device__ void for_items(const Problem& p, Work work) {
  const int blocks = gridDim.x, block = blockIdx.x;
  for (int round = 0;; ++round) {
    const int index = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
    if (index >= p.num_items) return;
    const Item item(p.items + static_cast<int64_t>(index) * p.item_fields);
    if (item.begin < 0) return;
    work(item);
  }
}

// The item's rows of the gradient, 32 a stage, by the lanes of the copying warp.
__device__ void fill_gradient(const Problem& p, const Item& item, RankRing& ring, Place& place) {
  const int lane = threadIdx.x % 32;
  const uint32_t bytes = min(128, item.width - item.feature) * 4;
  for (int first = 0; first < item.count * kChunk; first += kGradRows, place.advance()) {
    const int row = first + lane;
    const int64_t at = row < item.count * kChunk ? p.grads[item.kind][item.arena_row + row] : 0;
    float* from = at == 0 ? nullptr : reinterpret_cast<float*>(at) + item.feature;
    const int rows = __popc(__ballot_sync(~0u, at != 0));
    uint8_t* to = place.at(ring);
    barrier_wait(&ring.empty[place.stage], place.parity ^ 1);
    reinterpret_cast<float**>(to + kGradAddresses)[lane] = from;
    __syncwarp();
    if (lane == 0) barrier_expect(&ring.full[place.stage], rows * bytes);
    __syncwarp();
    if (from != nullptr) load_row(to + lane * kGradStride, from, bytes, &ring.full[place.stage]);
  }
}

// The previous kernel has ended, and all before it: the next one may come.
__device__ void end_of_previous() {
  wait_for_previous();
  let_next_start();
}

__device__ void fill(const Problem& p, const Item& item, RankRing& ring, Place& place) {
  const int panels = item.count > 4 ? 2 : 1;
  const int first_row = item.kind == kDown ? p.first_row : 0;
  if (item.kind == kDown || !p.overlaps_previous_kernel) end_of_previous();
  for (int row = item.begin; row < item.end; row += kDepth, place.advance()) {
    if (threadIdx.x % 32 == 0) {
      uint8_t* to = place.begin_fill(ring, (2 + panels) * kPanel);
      uint64_t* full = &ring.full[place.stage];
      for (int i = 0; i < 2; ++i) load_tile(to + i * kPanel, &p.in[item.kind], full, item.columns[i], row - first_row);
      for (int i = 0; i < panels; ++i)
        load_tile(to + (2 + i) * kPanel, &p.rows[item.kind], full, item.rank_column + i * 64, row);
    }
    __syncwarp();
  }
  if (item.parts > 1) return;
  end_of_previous();
  fill_gradient(p, item, ring, place);
}

// Adds to the gradient in the ring and sends it back.
template <int N>
__device__ void add_in_ring(const Item& item, const float (&sums)[N / 2], RankRing& ring, Place& place, int thread) {
  const int lane = thread % 32;
  const int feature = thread / 32 * 16 + lane / 4;
  const uint32_t bytes = min(128, item.width - item.feature) * 4;
#pragma unroll
  for (int first = 0; first < N; first += kGradRows) {
    if (first >= item.count * kChunk) break;
    barrier_wait(&ring.full[place.stage], place.parity);
    uint8_t* stage = place.at(ring);
#pragma unroll
    for (int i = first / 2; i < (first + kGradRows) / 2 && i < N / 2; ++i) {
      const int rank = i / 4 * 8 + lane % 4 * 2 + i % 2 - first;
      float* at = reinterpret_cast<float*>(stage + rank * kGradStride) + feature + i / 2 % 2 * 8;
      *at += sums[i];
    }
    fence_shared_for_copies();
    multipliers_sync();
    if (thread < 32) {
      float* to = reinterpret_cast<float**>(stage + kGradAddresses)[lane];
      if (to != nullptr) store_row(to, stage + lane * kGradStride, bytes);
      store_commit();
      store_wait_read<0>();
      __syncwarp();
    }
    if (lane == 0) barrier_arrive(&ring.empty[place.stage]);
    place.advance();
  }
}

// Adds to the gradient, many elements at a time: one by one, each would wait for the one before. Where accumulator i
// lies: of every 8 rank columns a thread holds a pair, in features 8 apart.
template <int N>
__device__ void add(const Item& item, const float (&sums)[N / 2], const RankRing& ring, int thread) {
  constexpr int batch = 16;
  const int lane = thread % 32;
  const int feature = item.feature + thread / 32 * 16 + lane / 4;
  const auto place = [&](int i) -> float* {
    const int f = feature + i / 2 % 2 * 8;
    float* row = ring.rank_rows[i / 4 * 8 + lane % 4 * 2 + i % 2];
    return row == nullptr || f >= item.width ? nullptr : row + f;
  };
#pragma unroll
  for (int first = 0; first < N / 2; first += batch) {
    float old[batch];
#pragma unroll
    for (int j = 0; j < batch && first + j < N / 2; ++j) {
      const float* at = place(first + j);
      old[j] = at == nullptr ? 0.f : __ldcg(at);
    }
#pragma unroll
    for (int j = 0; j < batch && first + j < N / 2; ++j) {
      float* at = place(first + j);
      if (at != nullptr) __stcg(at, old[j] + sums[first + j]);
    }
  }
}

// The sums of all runs of a segment's last portion, by the block that comes last; false in the others. The portions
// before it have been added to the gradient.
template <int N, bool kPortions>
__device__ bool gather(const Problem& p, const Item& item, float (&sums)[N / 2], RankRing& ring, int thread) {
  constexpr int size = N / 2 * kMultipliers;
  float* parts = p.workspace + static_cast<int64_t>(item.workspace) * kMultipliers;
  float* mine = parts + static_cast<int64_t>(item.part) * size;
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) __stcg(mine + i * kMultipliers + thread, sums[i]);
  __threadfence();
  multipliers_sync();
  if (thread == 0) {
    const bool last = atomicAdd(p.counters + item.counter, 1) == item.parts - 1;
    if (last) p.counters[item.counter] = 0;  // for the next launch
    ring.flag = last;
  }
  multipliers_sync();
  if (!ring.flag) return false;
  __threadfence();
#pragma unroll
  for (float& s : sums) s = 0.f;
  int border = kPortions ? p.borders[2 * item.counter] : 0;
  const int no_border = kPortions ? p.borders[2 * item.counter + 1] : 0;
  for (int part = 0; part < item.parts; ++part) {
    if (kPortions && border < no_border && part == p.borders[border]) {
      add<N>(item, sums, ring, thread);
#pragma unroll
      for (float& s : sums) s = 0.f;
      ++border;
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
      sums[i] += __ldcg(parts + static_cast<int64_t>(part) * size + i * kMultipliers + thread);
  }
  return true;
}

template <int N, bool kDropout, bool kPortions>
__device__ void multiply(const Problem& p, const Item& item, RankRing& ring, Place& place, int thread) {
  constexpr int panels = N > 64 ? 2 : 1;
  const int warpgroup = thread / 128;
  float sums[N / 2];
#pragma unroll
  for (float& s : sums) s = 0.f;
  const Mask mask(kDropout && item.kind == kDown ? p.dropout[item.slot] : 0.f);
  const int own_row = item.begin + thread % 128 / 2;
  int key = 0;
  if (kDropout && mask.dropped != 0 && own_row < item.end) key = p.row_keys[own_row];
  __syncwarp();
  int previous = -1;
  for (int row = item.begin; row < item.end; row += kDepth, place.advance()) {
    barrier_wait(&ring.full[place.stage], place.parity);
    uint8_t* panel = place.at(ring) + warpgroup * kPanel;
    uint8_t* ranks = place.at(ring) + 2 * kPanel;
    const int valid = item.end - row;
    if (kDropout && mask.dropped != 0) {
      const uint32_t steps = seed_steps(p.first_column + item.columns[warpgroup]);
      drop_panel(panel, thread % 128, mask, mix32(key ^ p.dropout_key), steps);
      const int next = row + kDepth + thread % 128 / 2;
      if (next < item.end) key = p.row_keys[next];
    }
    if (valid < kDepth) {
      clear_rows(panel, thread % 128, valid);
#pragma unroll
      for (int i = 0; i < panels; ++i) clear_rows(ranks + i * kPanel, thread % 128, valid);
    }
    if (valid < kDepth || (kDropout && mask.dropped != 0)) finish_writes(warpgroup);
    const uint64_t a = operand(panel, kPanel);
    const uint64_t b = operand(ranks, kPanel);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / kChunk; ++i) {
      const uint64_t along = i * (kChunk * 128 >> 4);
      wgmma<N, 1, 1>(sums, a + along, b + along, 1);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && thread % 32 == 0) barrier_arrive(&ring.empty[previous]);
    previous = place.stage;
  }
  wgmma_wait<0>();
  if (thread % 32 == 0) barrier_arrive(&ring.empty[previous]);
  if (item.parts == 1) {
    add_in_ring<N>(item, sums, ring, place, thread);
    return;
  }
  if (thread < kMaxChunks * kChunk)
    ring.rank_rows[thread] =
        thread < item.count * kChunk ? reinterpret_cast<float*>(p.grads[item.kind][item.arena_row + thread])
                                      : nullptr;
  multipliers_sync();
  if (gather<N, kPortions>(p, item, sums, ring, thread)) add<N>(item, sums, ring, thread);
  multipliers_sync();  // the rows' addresses and the flag have been read
}

template <bool kDropout, bool kPortions>
__global__ void __launch_bounds__(kRankThreads, 2) rank_sums(const __grid_constant__ Problem p) {
  RankRing& ring = rank_ring();
  init_ring(ring);
  const int thread = threadIdx.x;
  Place place(kStageBytes);
  if (thread < kMultipliers) {
    for_items(p, [&](const Item& item) {
      switch (kernel_width(item.count)) {
        case 16: multiply<16, kDropout, kPortions>(p, item, ring, place, thread); break;
        case 32: multiply<32, kDropout, kPortions>(p, item, ring, place, thread); break;
        case 64: multiply<64, kDropout, kPortions>(p, item, ring, place, thread); break;
        default: multiply<128, kDropout, kPortions>(p, item, ring, place, thread);
      }
    });
    if (thread < 32) store_wait_all();
  } else {
    for_items(p, [&](const Item& item) { fill(p, item, ring, place); });
    end_of_previous();
  }
  wait_for_previous();
}

template <bool kDropout, bool kPortions>
int launch(const Problem& problem, int blocks, cudaStream_t stream) {
  return launch_kernel<rank_sums<kDropout, kPortions>>(problem, blocks, kRankThreads, sizeof(RankRing) + 1024, 0, stream);
}

}  // namespace

// What the caller passes: `SumsArguments` of ops/lora/cuda_arguments.py, field by field.
struct TloraSums {
  const void *x, *ds, *dy, *s;
  const int *items, *borders;
  const int64_t *grad_a, *grad_b;
  float* workspace;
  int* counters;
  const int* row_keys;
  const float* dropout;
  int64_t num_rows, x_rows, x_columns, dy_columns;
  int num_items, item_fields, blocks, row_width, first_row, dropout_key, first_column, overlaps_previous_kernel,
      device;
};

TLORA_EXPORT int tlora_sums_size() { return sizeof(TloraSums); }

TLORA_EXPORT int tlora_sums(const TloraSums* arguments, cudaStream_t stream) {
  const TloraSums& g = *arguments;
  if (g.num_items == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  Problem p{};
  // No row of x: a window outside of all segments may be empty.
  if ((g.x_rows > 0 && !make_map(&p.in[kDown], g.x, g.x_rows, g.x_columns, 64)) ||
      !make_map(&p.rows[kDown], g.ds, g.num_rows, g.row_width, 64) ||
      !make_map(&p.in[kUp], g.dy, g.num_rows, g.dy_columns, 64) ||
      !make_map(&p.rows[kUp], g.s, g.num_rows, g.row_width, 64))
    return fail("tensor map", "an operand must have rows, 16-byte aligned in address and size");
  p.items = g.items;
  p.borders = g.borders;
  p.num_items = g.num_items;
  p.item_fields = g.item_fields;
  p.grads[kDown] = g.grad_a;
  p.grads[kUp] = g.grad_b;
  p.first_row = g.first_row;
  p.workspace = g.workspace;
  p.counters = g.counters;
  p.dropout = g.dropout;
  p.row_keys = g.row_keys;
  p.dropout_key = g.dropout_key;
  p.first_column = g.first_column;
  p.overlaps_previous_kernel = g.overlaps_previous_kernel;
  // Kernels of their own: what portions need would cost registers where there are none.
  const bool portions = g.borders != nullptr;
  if (g.dropout) return portions ? launch<true, true>(p, g.blocks, stream) : launch<true, false>(p, g.blocks, stream);
  return portions ? launch<false, true>(p, g.blocks, stream) : launch<false, false>(p, g.blocks, stream);
}
