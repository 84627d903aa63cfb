// Where the sums of rank_pair.cu go: dS's parts and both its forms, dB's parts and the gradients.
#pragma once
#include "rank_pair_copies.cuh"

namespace pair {

// Where ext holds rank column `column` of the tile of row t.
__device__ __forceinline__ uint16_t* ext_row(const Problem& p, const Item& item, int t, int column) {
  const int tile = t / kTileRows - item.begin / kTileRows;
  const int chunk = p.chunks[item.chunk + tile * item.tile_chunks + column / kChunk];
  return static_cast<uint16_t*>(p.ext) + (static_cast<int64_t>(chunk) * kChunk + column % kChunk) * kTileRows;
}

// Zeros in the rows of other adapters, in the first tile of a segment and in its last.
__device__ void clear_ext(const Problem& p, const Item& item, int t, int first, int last, int thread) {
  const int rows = last - first;
  for (int i = thread; i < rows * item.count * kChunk; i += kMultipliers)
    ext_row(p, item, t, i / rows)[first + i % rows] = 0;
}

__device__ void clear_others(const Problem& p, const Item& item, int thread) {
  if (item.place != 0) return;
  if (item.part == 0) clear_ext(p, item, item.begin, 0, item.begin % kTileRows, thread);
  if (item.part == item.parts - 1)
    clear_ext(p, item, item.end - 1, (item.end - 1) % kTileRows + 1, kTileRows, thread);
}

// What the warps that multiply know of an item: dS's parts, their counters, and where dS goes.
template <int N>
struct RankRows {
  static constexpr int kElements = N / 2, kBatch = kElements < 16 ? kElements : 16;
  const Problem& p;
  const Item& item;
  const int thread;
  const float scale;

  __device__ RankRows(const Problem& p, const Item& item, int thread)
      : p(p), item(item), thread(thread),
        scale(p.scaling[item.slot] / (1.f - (p.dropout == nullptr ? 0.f : p.dropout[item.slot]))) {}

  __device__ float* parts(int step, int range) const {
    const int64_t unit = item.ds_workspace + static_cast<int64_t>(step * item.ranges + range) * kElements;
    return p.workspace + unit * kMultipliers + thread;
  }

  __device__ int* counter(int step) const { return p.counters + item.ds_counter + step * kWarps + thread / 32; }

  // Leaves this range's part of a step.
  __device__ void leave(int step, const float (&sums)[kElements]) const {
    if (item.ranges == 1) {
      write(step, 0, sums);
      return;
    }
    float* to = parts(step, item.range);
#pragma unroll
    for (int i = 0; i < kElements; ++i) __stcg(to + i * kMultipliers, sums[i]);
  }

  // Counts this warp's part of a step; what it returns is for `finish`, a good while later.
  __device__ int count(int step) const {
    if (item.ranges == 1) return 0;
    __threadfence();
    __syncwarp();
    return thread % 32 == 0 ? atomicAdd(counter(step), 1) : 0;
  }

  // Adds all ranges' parts, in order, if this warp was the last.
  __device__ void finish(int step, int before) const {
    if (item.ranges == 1 || __shfl_sync(~0u, before, 0) != item.ranges - 1) return;
    if (thread % 32 == 0) *counter(step) = 0;  // for the next launch
    __threadfence();
#pragma unroll
    for (int first = 0; first < kElements; first += kBatch) {
      float sums[kBatch];
#pragma unroll
      for (float& s : sums) s = 0.f;
#pragma unroll(32 / kBatch)
      for (int range = 0; range < item.ranges; ++range) {
        const float* from = parts(step, range) + first * kMultipliers;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) sums[i] += __ldcg(from + i * kMultipliers);
      }
      write(step, first, sums);
    }
  }

  // Accumulators from `first` on. Of every 8 rank columns a thread holds a pair, in rows 8 apart.
  template <int kSize>
  __device__ void write(int step, int first, const float (&sums)[kSize]) const {
    const int lane = thread % 32;
#pragma unroll
    for (int q = 0; q < kSize / 2; ++q) {
      const int column = (first / 2 + q) / 2 * 8 + lane % 4 * 2;
      const int t = item.begin + step * kStepRows + thread / 32 * 16 + lane / 4 + q % 2 * 8;
      if (column >= item.count * kChunk || t >= item.end) continue;
      const uint32_t packed = pack_pair(sums[2 * q] * scale, sums[2 * q + 1] * scale);
      *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.rows) + static_cast<int64_t>(t) * p.row_width +
                                   item.rank_column + column) = packed;
      uint16_t* to = ext_row(p, item, t, column) + t % kTileRows;
      to[0] = static_cast<uint16_t>(packed);
      to[kTileRows] = static_cast<uint16_t>(packed >> 16);
    }
  }
};

// Adds sums to rows of a gradient of `width` features, many elements at a time: one by one, each would wait for the one
// before. Where accumulator i lies: of every 8 rank columns a thread holds a pair, in features 8 apart. `first`: the
// feature of the first of 128.
template <int N>
__device__ void add_to_gradient(float* const* rows, int first, int width, const float (&sums)[N / 2], int thread) {
  constexpr int batch = 16;
  const int lane = thread % 32;
  const int feature = first + thread / 32 * 16 + lane / 4;
  const auto place = [&](int i) -> float* {
    const int f = feature + i / 2 % 2 * 8;
    float* row = rows[i / 4 * 8 + lane % 4 * 2 + i % 2];
    return row == nullptr || f >= width ? nullptr : row + f;
  };
#pragma unroll
  for (int begin = 0; begin < N / 2; begin += batch) {
    float old[batch];
#pragma unroll
    for (int j = 0; j < batch && begin + j < N / 2; ++j) {
      const float* at = place(begin + j);
      old[j] = at == nullptr ? 0.f : __ldcg(at);
    }
#pragma unroll
    for (int j = 0; j < batch && begin + j < N / 2; ++j) {
      float* at = place(begin + j);
      if (at != nullptr) __stcg(at, old[j] + sums[begin + j]);
    }
  }
}

template <int N, int kPanels>
__device__ void add_panels(const Item& item, const float (&sums)[kPanels][N / 2], float* const* rows, int thread) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    add_to_gradient<N>(rows, item.place + panel * kPanelColumns, item.width, sums[panel], thread);
}

// The sums of all runs of a segment's last portion, by the block that comes last; false in the others. The portions
// before it have been added to the gradient.
template <int N, int kPanels, bool kPortions>
__device__ bool gather(const Problem& p, const Item& item, float (&sums)[kPanels][N / 2], Memory& m, int thread) {
  constexpr int size = kPanels * N / 2 * kMultipliers;
  float* parts = p.workspace + static_cast<int64_t>(item.workspace) * kMultipliers + thread;
  float* mine = parts + static_cast<int64_t>(item.part) * size;
#pragma unroll
  for (int i = 0; i < kPanels * N / 2; ++i) __stcg(mine + i * kMultipliers, sums[i / (N / 2)][i % (N / 2)]);
  __threadfence();
  multipliers_sync();
  if (thread == 0) {
    const bool last = atomicAdd(p.counters + item.counter, 1) == item.parts - 1;
    if (last) p.counters[item.counter] = 0;  // for the next launch
    m.flag = last;
  }
  multipliers_sync();
  if (!m.flag) return false;
  __threadfence();
#pragma unroll
  for (auto& panel : sums)
#pragma unroll
    for (float& s : panel) s = 0.f;
  int border = kPortions ? p.borders[2 * item.counter] : 0;
  const int no_border = kPortions ? p.borders[2 * item.counter + 1] : 0;
#pragma unroll(kPortions ? 1 : 128 / (kPanels * N))
  for (int part = 0; part < item.parts; ++part) {
    if (kPortions && border < no_border && part == p.borders[border]) {
      add_panels<N, kPanels>(item, sums, m.gradient_rows, thread);
#pragma unroll
      for (auto& panel : sums)
#pragma unroll
        for (float& s : panel) s = 0.f;
      ++border;
    }
    const float* from = parts + static_cast<int64_t>(part) * size;
#pragma unroll
    for (int i = 0; i < kPanels * N / 2; ++i) sums[i / (N / 2)][i % (N / 2)] += __ldcg(from + i * kMultipliers);
  }
  return true;
}

}  // namespace pair
