// dS = scaling / (1 - p) dy B and dB += s^T dy, from one read of dy.
//
// Semantics, for row t of the item's run, rank row j of its chunks and feature f of its range of the target's columns:
//   part[range][t, j] = sum_f dy[t, column(f)] B[j, f]
//   dS[t, j] = scaling / (1 - p) sum_ranges part[range][t, j]
//   grad[j, f] += sum_t s[t, j] dy[t, column(f)]
// dS is written twice, as rank_rows.cu writes it: transposed into ext with zeros in rows of other adapters, and as
// rows. Ranges of columns are added in order by the warp that comes last to its 16 rows, so dS of a row follows from
// that row and B alone. Runs are cut and added, portion by portion, as rank_sums.cu does: with runs as long, dB has the
// same bits.
//
// Blocks are persistent, one a multiprocessor. An item is a run of rows by a range of columns: at most `most_panels`
// panels of 128, fewer for many ranks, so that dB's sums stay in registers and B's columns in 32 KB of shared memory.
// It goes through the run in steps of 128 rows. A stage is a panel of dy, [128 rows, 128 columns] in halves of 64
// columns. For dS each warpgroup takes 64 of the rows, for dB 64 of the columns. A step's parts of dS are counted while
// the next one is multiplied, and added up another step later: nobody waits for memory.
#include "rank_pair_sums.cuh"
#include "wgmma.cuh"

namespace pair {

// Zeros rows from `first` on of 64 columns, by a warpgroup: rows of another adapter may hold anything, NaN too.
__device__ __forceinline__ void clear_half(uint8_t* half, int thread, int first) {
  if (thread < first) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) *reinterpret_cast<uint4*>(half + thread * 128 + i * 16) = uint4{};
}

struct Turns {  // of the warps that multiply, through all buffers
  uint32_t b_parity = 0;
  Turn<2> s;
};

template <int N, int kPanels, bool kPortions>
__device__ void multiply(const Problem& p, const Item& item, Memory& m, Turn<kStages>& stage,
                         Turns& turns, int thread) {
  const int warpgroup = thread / 128;
  const int steps = item.steps();
  const RankRows<N> ds(p, item, thread);
  clear_others(p, item, thread);
  float sums[kPanels][N / 2];
#pragma unroll
  for (auto& panel : sums)
#pragma unroll
    for (float& s : panel) s = 0.f;
  barrier_wait(&m.b_full, turns.b_parity);
  turns.b_parity ^= 1;
  int before = 0;  // how many ranges came before this one to the step before
  for (int step = 0; step < steps; ++step, turns.s.advance()) {
    const int valid = item.end - item.begin - step * kStepRows;
    uint8_t* ranks = m.s[turns.s.at];
    barrier_wait(&m.s_full[turns.s.at], turns.s.parity);
    if (valid < kStepRows) clear_half(ranks, thread % 128, valid);  // by both warpgroups: each waits for its own alone
    float rows[N / 2];
#pragma unroll
    for (float& r : rows) r = 0.f;
    int previous = -1;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (panel == item.panels) break;
      barrier_wait(&m.full[stage.at], stage.parity);
      uint8_t* dy = m.dy[stage.at];
      if (valid < kStepRows) {
        clear_half(dy + warpgroup * kHalf, thread % 128, valid);
        finish_writes(warpgroup);
      }
      wgmma_fence();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint64_t a = operand(dy + h * kHalf + warpgroup * kPanel, 0);
        const uint64_t b = operand(m.b + (2 * panel + h) * N * 128, 0);
#pragma unroll
        for (int i = 0; i < kDepth / kChunk; ++i) {
          const uint64_t along = i * (kChunk * 2 >> 4);
          wgmma<N, 0, 0>(rows, a + along, b + along, 1);
        }
      }
      const uint64_t a = operand(dy + warpgroup * kHalf, kPanel);
      const uint64_t b = operand(ranks, kPanel);
#pragma unroll
      for (int i = 0; i < kStepRows / kChunk; ++i) {
        const uint64_t along = i * (kChunk * 128 >> 4);
        wgmma<N, 1, 1>(sums[panel], a + along, b + along, 1);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0 && thread % 32 == 0) barrier_arrive(&m.empty[previous]);
      previous = stage.at;
      stage.advance();
    }
    wgmma_wait<0>();
    settle(rows);
    if (thread % 32 == 0) {
      barrier_arrive(&m.empty[previous]);
      barrier_arrive(&m.s_empty[turns.s.at]);
    }
    __syncwarp();
    if (step > 1) ds.finish(step - 2, before);
    if (step > 0) before = ds.count(step - 1);
    ds.leave(step, rows);
  }
#pragma unroll
  for (auto& panel : sums) settle(panel);
  if (thread % 32 == 0) barrier_arrive(&m.b_empty);
  __syncwarp();
  if (steps > 1) ds.finish(steps - 2, before);
  ds.finish(steps - 1, ds.count(steps - 1));
  if (thread < kPairRanks)
    m.gradient_rows[thread] =
        thread < item.count * kChunk ? reinterpret_cast<float*>(p.grads[item.arena_row + thread]) : nullptr;
  multipliers_sync();
  if (item.parts == 1 || gather<N, kPanels, kPortions>(p, item, sums, m, thread))
    add_panels<N, kPanels>(item, sums, m.gradient_rows, thread);
  multipliers_sync();  // the rows' addresses and the flag have been read
}

template <int kMost, bool kPortions>
__global__ void __launch_bounds__(kPairThreads, 1) rank_pair(const __grid_constant__ Problem p) {
  extern __shared__ uint8_t unaligned[];
  Memory& m = *reinterpret_cast<Memory*>((reinterpret_cast<uintptr_t>(unaligned) + 1023) & ~1023ull);
  m.init();
  wait_for_previous();
  let_next_start();
  const int thread = threadIdx.x;
  Turn<kStages> stage;
  if (thread < kMultipliers) {
    take_registers<232>();
    Turns turns;
    for_items(p, [&](const Item& item) {
      switch (kernel_width(item.count)) {
        case 16: multiply<16, range_panels(kMost, 16), kPortions>(p, item, m, stage, turns, thread); break;
        case 32: multiply<32, range_panels(kMost, 32), kPortions>(p, item, m, stage, turns, thread); break;
        default: multiply<64, range_panels(kMost, 64), kPortions>(p, item, m, stage, turns, thread);
      }
    });
    return;
  }
  keep_registers<40>();
  if (thread == kMultipliers) {
    for_items(p, [&](const Item& item) { fill_dy(p, item, m, stage); });
  } else if (thread == kMultipliers + 32) {
    Turn<2> s;
    Turn<1> b;
    for_items(p, [&](const Item& item) { fill_ranks(p, item, m, s, b); });
  }
}

template <int kMost>
int launch(const Problem& problem, int blocks, cudaStream_t stream) {
  // Kernels of their own: what portions need would cost registers where there are none.
  if (problem.borders != nullptr)
    return launch_kernel<rank_pair<kMost, true>>(problem, blocks, kPairThreads, sizeof(Memory) + 1024, 0, stream);
  return launch_kernel<rank_pair<kMost, false>>(problem, blocks, kPairThreads, sizeof(Memory) + 1024, 0, stream);
}

}  // namespace pair

// What the caller passes: `PairArguments` of ops/lora/cuda/arguments.py, field by field.
struct TloraPair {
  const void *dy, *s;
  void *ext, *rows;
  const int *items, *chunks, *borders;
  const int64_t* grad_b;
  float* workspace;
  int* counters;
  const float *scaling, *dropout;
  int64_t num_rows, dy_columns;
  Factors factors;
  int num_targets, num_items, item_fields, blocks, row_width, most_panels, device;
};

TLORA_EXPORT int tlora_pair_size() { return sizeof(TloraPair); }

TLORA_EXPORT int tlora_pair(const TloraPair* arguments, cudaStream_t stream) {
  const TloraPair& g = *arguments;
  if (g.num_items == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  pair::Problem p{};
  bool made = make_map(&p.dy, g.dy, g.num_rows, g.dy_columns, pair::kStepRows) &&
              make_map(&p.dy_strip, g.dy, g.num_rows, g.dy_columns, pair::kStrip) &&
              make_map(&p.s, g.s, g.num_rows, g.row_width, pair::kStepRows) &&
              make_map(&p.s_strip, g.s, g.num_rows, g.row_width, pair::kStrip);
  for (int i = 0; i < g.num_targets; ++i) {
    made = made && make_map(&p.factors[i], g.factors.at[i], g.factors.rows[i], g.factors.width[i], kChunk);
    p.columns[i] = g.factors.columns[i];
  }
  if (!made) return fail("tensor map", "an operand must be 16-byte aligned in address and row");
  p.items = g.items;
  p.num_items = g.num_items;
  p.item_fields = g.item_fields;
  p.dy_columns = static_cast<int>(g.dy_columns);
  p.chunks = g.chunks;
  p.borders = g.borders;
  p.grads = g.grad_b;
  p.workspace = g.workspace;
  p.counters = g.counters;
  p.ext = g.ext;
  p.rows = g.rows;
  p.row_width = g.row_width;
  p.scaling = g.scaling;
  p.dropout = g.dropout;
  p.most_panels = g.most_panels;
  switch (g.most_panels) {
    case 2: return pair::launch<2>(p, g.blocks, stream);
    case 4: return pair::launch<4>(p, g.blocks, stream);
    case 8: return pair::launch<8>(p, g.blocks, stream);
    default: return fail("most_panels", "must be 2, 4 or 8");
  }
}
