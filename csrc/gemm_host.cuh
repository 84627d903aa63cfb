// The host's side that GEMMs with rank chunks share: what the caller passes, and the parts of a problem.
#pragma once
#include "gemm_tiles.cuh"

// What the caller passes: `GemmArguments` of ops/lora/cuda_arguments.py, field by field.
struct TloraGemm {
  const void *x, *weight, *bias, *ext;
  void* out;
  const int *tile_chunks, *chunk_rows, *row_keys, *row_slots;
  const float* dropout;
  int64_t rows, columns_out, depth, ext_rows;
  Factors factors;
  int num_targets, dropout_key, first_column;
  int transposed;  // W is [columns_out, depth], else [depth, columns_out]
  int tile_columns, group, blocks, overlaps_previous_kernel, device;
};

namespace gemm {

inline bool touches(const Columns& c, int begin, int end) {
  for (int n = begin; n < end; n += 64) {
    const int inside = n % c.stride - c.begin;
    if (inside >= 0 && inside < c.width) return true;
  }
  return false;
}

// The targets that write a column tile, as a range.
inline uint8_t targets_of(const TloraGemm& g, int begin, int end) {
  if (g.factors.columns[0].stride == 0) return g.num_targets << 4;
  int first = g.num_targets, last = 0;
  for (int i = 0; i < g.num_targets; ++i) {
    if (!touches(g.factors.columns[i], begin, end)) continue;
    first = first < i ? first : i;
    last = i + 1;
  }
  return first < last ? first | last << 4 : 0;
}

// Describes all but the base's operands; returns 0, or fails.
inline int describe(const TloraGemm& g, Problem* p) {
  p->num_targets = g.num_targets;
  p->rows = static_cast<int>(g.rows);
  p->columns_out = static_cast<int>(g.columns_out);
  p->depth = static_cast<int>(g.depth);
  p->row_tiles = static_cast<int>((g.rows + kTileRows - 1) / kTileRows);
  p->column_tiles = static_cast<int>((g.columns_out + g.tile_columns - 1) / g.tile_columns);
  if (p->column_tiles > kMaxColumnTiles) return fail("columns_out", "has too many column tiles");
  p->group = g.group;
  p->tile_chunks = g.tile_chunks;
  p->chunk_rows = g.chunk_rows;
  p->bias = g.bias;
  p->row_keys = g.row_keys;
  p->row_slots = g.row_slots;
  p->dropout = g.dropout;
  p->dropout_key = g.dropout_key;
  p->first_column = g.first_column;
  p->overlaps_previous_kernel = g.overlaps_previous_kernel && g.tile_chunks != nullptr;
  for (int i = 0; i < g.num_targets && i < kMaxTargets; ++i) p->columns[i] = g.factors.columns[i];
  for (int i = 0; i < p->column_tiles && g.tile_chunks != nullptr; ++i)
    p->targets[i] = targets_of(g, i * g.tile_columns, (i + 1) * g.tile_columns);
  return 0;
}

// The maps of the output and of the rank part; false where an operand is not aligned.
inline bool make_shared_maps(const TloraGemm& g, Problem* p) {
  bool made = make_map(&p->out, g.out, g.rows, g.columns_out, 64);
  if (g.tile_chunks == nullptr) return made;
  made = made && make_map(&p->ext, g.ext, g.ext_rows, kTileRows, 64);
  const Factors& f = g.factors;
  for (int i = 0; i < (f.columns[0].stride == 0 ? 1 : g.num_targets); ++i)
    made = made && make_arena_map(&p->factors[i], f.at[i], f.rows[i], f.width[i], kChunk);
  return made;
}

inline int fail_maps() { return fail("tensor map", "an operand must have rows, 16-byte aligned in address and size"); }

}  // namespace gemm
