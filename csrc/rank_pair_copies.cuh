// What rank_pair.cu works on, and how it comes into shared memory: its items, its buffers, and the warps that copy.
#pragma once
#include "host.cuh"
#include "rank_ring.cuh"

namespace pair {

constexpr int kPairThreads = 384;  // warps 0-7 multiply, warp 8 copies dy, warp 9 copies s and B
constexpr int kStepRows = 128;
constexpr int kStrip = 16;                  // rows of a copy where less than a step is left
constexpr int kHalf = kStepRows * 128;      // bytes of 64 columns
constexpr int kPanelColumns = 128;
constexpr int kPairChunks = 4;              // rank chunks of an item: PAIR_CHUNKS of ops/lora/cuda/pair_items.py
constexpr int kPairRanks = kPairChunks * kChunk;
constexpr int kWarps = kMultipliers / 32;
constexpr int kStages = 5;

// Panels of a range: sums of 64 accumulators a thread at most.
__host__ __device__ constexpr int range_panels(int most_panels, int width) {
  return most_panels * width < 128 ? most_panels : 128 / width;
}

struct Problem {
  CUtensorMap dy, dy_strip, s, s_strip;  // boxes of 128 rows and of 16
  CUtensorMap factors[kMaxTargets];      // arenas of B
  Columns columns[kMaxTargets];
  const int* items;
  int num_items, item_fields, dy_columns, most_panels;
  const int* chunks;   // ext chunks, pair by pair
  const int* borders;  // as in rank_sums.cu; null: no segment has several portions
  const int64_t* grads;
  float* workspace;
  int* counters;
  void *ext, *rows;
  int row_width;
  const float *scaling, *dropout;  // [slots]; dropout null: none
};

struct Item {
  int begin, end;  // rows of the micro-batch; begin -1: no more items
  int target, place, width;  // the range's first feature; the target's features
  int count, rank_column, factor_row, arena_row, slot;
  int part, parts, workspace, counter;  // of dB: one counter
  int ds_workspace, ds_counter;         // of dS: a counter a step and warp
  int chunk, tile_chunks;  // of `chunks`: the first in the tile of `begin`; how many further each next tile's are
  int panels, range, ranges;

  __device__ Item(const int* at, int most_panels)
      : begin(at[0]), end(at[1]), target(at[2]), place(at[3]), width(at[4]), count(at[5]), rank_column(at[6]),
        factor_row(at[7]), arena_row(at[8]), slot(at[9]), part(at[10]), parts(at[11]), workspace(at[12]),
        counter(at[13]), ds_workspace(at[14]), ds_counter(at[15]), chunk(at[16]), tile_chunks(at[17]) {
    const int most = range_panels(most_panels, kernel_width(count));
    panels = min(most, (width - place + kPanelColumns - 1) / kPanelColumns);
    range = place / (most * kPanelColumns);
    ranges = (width + most * kPanelColumns - 1) / (most * kPanelColumns);
  }

  __device__ int steps() const { return (end - begin + kStepRows - 1) / kStepRows; }
};

struct Memory {
  alignas(1024) uint8_t dy[kStages][2 * kHalf];
  uint8_t s[2][kHalf];
  uint8_t b[2 * 128 * 128];  // half by half, [width, 64 columns]
  uint64_t full[kStages], empty[kStages], s_full[2], s_empty[2], b_full, b_empty;
  float* gradient_rows[kPairRanks];
  int flag;

  __device__ void init() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) init_pair(&full[i], &empty[i]);
      for (int i = 0; i < 2; ++i) init_pair(&s_full[i], &s_empty[i]);
      init_pair(&b_full, &b_empty);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }

  __device__ static void init_pair(uint64_t* full, uint64_t* empty) {
    barrier_init(full, 1);
    barrier_init(empty, kWarps);
  }
};

// A place in a ring of so many buffers.
template <int kBuffers>
struct Turn {
  int at = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++at == kBuffers) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Runs through this block's items, as in rank_sums.cu: longest first, every other round backwards.
template <typename Work>
__device__ void for_items(const Problem& p, Work work) {
  const int blocks = gridDim.x, block = blockIdx.x;
  for (int round = 0;; ++round) {
    const int index = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
    if (index >= p.num_items) return;
    const Item item(p.items + static_cast<int64_t>(index) * p.item_fields, p.most_panels);
    if (item.begin < 0) return;
    work(item);
  }
}

__device__ __forceinline__ int strips(int valid) { return (min(valid, kStepRows) + kStrip - 1) / kStrip; }

// 64 columns of a step's rows: in one copy, or strip by strip where not all of them are the run's.
__device__ void load_half(uint8_t* to, const CUtensorMap* whole, const CUtensorMap* strip, uint64_t* barrier,
                          int column, int row, int valid) {
  if (valid >= kStepRows) {
    load_tile(to, whole, barrier, column, row);
    return;
  }
  for (int i = 0; i < strips(valid); ++i)
    load_tile(to + i * kStrip * 128, strip, barrier, column, row + i * kStrip);
}

__device__ void fill_dy(const Problem& p, const Item& item, Memory& m, Turn<kStages>& turn) {
  const Columns& columns = p.columns[item.target];
  for (int row = item.begin; row < item.end; row += kStepRows) {
    const int valid = item.end - row;
    for (int panel = 0; panel < item.panels; ++panel, turn.advance()) {
      uint64_t* full = &m.full[turn.at];
      barrier_wait(&m.empty[turn.at], turn.parity ^ 1);
      barrier_expect(full, 2 * strips(valid) * kStrip * 128);
      for (int h = 0; h < 2; ++h) {
        const int place = item.place + panel * kPanelColumns + h * 64;
        const int column = place < item.width ? output_column(columns, place) : p.dy_columns;  // beyond: zeros
        load_half(m.dy[turn.at] + h * kHalf, &p.dy, &p.dy_strip, full, column, row, valid);
      }
    }
  }
}

__device__ void fill_ranks(const Problem& p, const Item& item, Memory& m, Turn<2>& s, Turn<1>& b) {
  const int halves = 2 * item.panels, width = kernel_width(item.count);
  barrier_wait(&m.b_empty, b.parity ^ 1);
  barrier_expect(&m.b_full, halves * item.count * kChunk * 128);
  for (int half = 0; half < halves; ++half)
    for (int i = 0; i < item.count; ++i)
      load_tile(m.b + (half * width + i * kChunk) * 128, &p.factors[item.target], &m.b_full, item.place + half * 64,
                item.factor_row + i * kChunk);
  b.advance();
  for (int row = item.begin; row < item.end; row += kStepRows, s.advance()) {
    const int valid = item.end - row;
    barrier_wait(&m.s_empty[s.at], s.parity ^ 1);
    barrier_expect(&m.s_full[s.at], strips(valid) * kStrip * 128);
    load_half(m.s[s.at], &p.s, &p.s_strip, &m.s_full[s.at], item.rank_column, row, valid);
  }
}

}  // namespace pair
