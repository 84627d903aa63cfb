// The host's side of lora_gemm.cuh: makes the tensor maps and chooses a kernel. ops/lora/cuda/calls.py calls it.
#include "lora_gemm.cuh"

extern template int gemm::launch_width<128>(const Problem&, bool, int, cudaStream_t);
extern template int gemm::launch_width<192>(const Problem&, bool, int, cudaStream_t);
extern template int gemm::launch_width<256>(const Problem&, bool, int, cudaStream_t);

// What the caller passes: `GemmArguments` of ops/lora/cuda/arguments.py, field by field.
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

namespace {

using namespace gemm;

int launch_any(const Problem& problem, int width, bool transposed, int blocks, cudaStream_t stream) {
  switch (width) {
    case 128: return launch_width<128>(problem, transposed, blocks, stream);
    case 192: return launch_width<192>(problem, transposed, blocks, stream);
    case 256: return launch_width<256>(problem, transposed, blocks, stream);
  }
  return fail("tile_columns", "must be 128, 192 or 256");
}

bool touches(const Columns& c, int begin, int end) {
  for (int n = begin; n < end; n += 64) {
    const int inside = n % c.stride - c.begin;
    if (inside >= 0 && inside < c.width) return true;
  }
  return false;
}

// The targets that write a column tile, as a range.
uint8_t targets_of(const TloraGemm& g, int begin, int end) {
  if (g.factors.columns[0].stride == 0) return g.num_targets << 4;
  int first = g.num_targets, last = 0;
  for (int i = 0; i < g.num_targets; ++i) {
    if (!touches(g.factors.columns[i], begin, end)) continue;
    first = first < i ? first : i;
    last = i + 1;
  }
  return first < last ? first | last << 4 : 0;
}

bool make_maps(const TloraGemm& g, Problem* p) {
  bool made = make_map(&p->x, g.x, g.rows, g.depth, kBlockRows) &&
              make_map(&p->out, g.out, g.rows, g.columns_out, 64);
  made = made && (g.transposed ? make_map(&p->weight, g.weight, g.columns_out, g.depth, g.tile_columns / 2)
                               : make_map(&p->weight, g.weight, g.depth, g.columns_out, 64));
  if (g.tile_chunks == nullptr) return made;
  made = made && make_map(&p->ext, g.ext, g.ext_rows, kTileRows, 64);
  const Factors& f = g.factors;
  for (int i = 0; i < (f.columns[0].stride == 0 ? 1 : g.num_targets); ++i)
    made = made && make_map(&p->factors[i], f.at[i], f.rows[i], f.width[i], kChunk);
  return made;
}

}  // namespace

TLORA_EXPORT const char* tlora_message() { return message; }

TLORA_EXPORT int tlora_gemm_size() { return sizeof(TloraGemm); }

TLORA_EXPORT int tlora_gemm(const TloraGemm* arguments, cudaStream_t stream) {
  const TloraGemm& g = *arguments;
  if (g.rows == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  Problem p{};
  p.num_targets = g.num_targets;
  p.rows = static_cast<int>(g.rows);
  p.columns_out = static_cast<int>(g.columns_out);
  p.depth = static_cast<int>(g.depth);
  p.row_tiles = static_cast<int>((g.rows + kTileRows - 1) / kTileRows);
  p.column_tiles = static_cast<int>((g.columns_out + g.tile_columns - 1) / g.tile_columns);
  if (p.column_tiles > kMaxColumnTiles) return fail("columns_out", "has too many column tiles");
  p.group = g.group;
  p.tile_chunks = g.tile_chunks;
  p.chunk_rows = g.chunk_rows;
  p.bias = g.bias;
  p.row_keys = g.row_keys;
  p.row_slots = g.row_slots;
  p.dropout = g.dropout;
  p.dropout_key = g.dropout_key;
  p.first_column = g.first_column;
  p.overlaps_previous_kernel = g.overlaps_previous_kernel && g.tile_chunks != nullptr;
  for (int i = 0; i < g.num_targets && i < kMaxTargets; ++i) p.columns[i] = g.factors.columns[i];
  for (int i = 0; i < p.column_tiles && g.tile_chunks != nullptr; ++i)
    p.targets[i] = targets_of(g, i * g.tile_columns, (i + 1) * g.tile_columns);
  if (!make_maps(g, &p)) return fail("tensor map", "an operand must be 16-byte aligned in address and row");
  return launch_any(p, g.tile_columns, g.transposed, g.blocks, stream);
}
