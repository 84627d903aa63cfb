// The host's side of fp8_dgrad.cuh. ops/quantised/cuda_dgrad.py calls it.
#include "fp8_dgrad.cuh"

// What the caller passes: `DgradArguments` of ops/quantised/cuda_dgrad.py, field by field.
struct TloraFp8Dgrad {
  const void *dy, *weight;
  const float *row_scales, *block_scales;
  const void *ext, *factor;
  void* out;
  const int *tile_chunks, *chunk_rows, *row_keys, *row_slots;
  const float* dropout;
  int64_t rows, features, depth, ext_rows, factor_rows;
  int num_targets, dropout_key, first_column;
  int group, blocks, overlaps_previous_kernel, device;
};

namespace {

using namespace fp8_dgrad;

// A map of a row-major matrix of bytes, read in boxes of 128 x 128, swizzled.
bool make_codes_map(CUtensorMap* map, const void* at, int64_t rows, int64_t columns) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns)};
  const cuuint32_t box[2] = {128, 128};
  const cuuint32_t steps[2] = {1, 1};
  return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(at), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool make_maps(const TloraFp8Dgrad& g, Problem* p) {
  const bool made = make_codes_map(&p->dy, g.dy, g.rows, g.depth) &&
                    make_codes_map(&p->weight, g.weight, g.depth, g.features) &&
                    make_map(&p->out, g.out, g.rows, g.features, 64);
  if (g.tile_chunks == nullptr) return made;
  return made && make_map(&p->ext, g.ext, g.ext_rows, kTileRows, 64) &&
         make_map(&p->factor, g.factor, g.factor_rows, g.features, kChunk);
}

}  // namespace

TLORA_EXPORT int tlora_fp8_dgrad_size() { return sizeof(TloraFp8Dgrad); }

TLORA_EXPORT int tlora_fp8_dgrad(const TloraFp8Dgrad* arguments, cudaStream_t stream) {
  const TloraFp8Dgrad& g = *arguments;
  if (g.rows == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  Problem p{};
  p.row_scales = g.row_scales;
  p.block_scales = g.block_scales;
  p.rows = static_cast<int>(g.rows);
  p.features = static_cast<int>(g.features);
  p.depth = static_cast<int>(g.depth);
  p.row_tiles = static_cast<int>((g.rows + kTileRows - 1) / kTileRows);
  p.feature_tiles = static_cast<int>((g.features + kClusterFeatures - 1) / kClusterFeatures);
  p.group = g.group;
  p.num_targets = g.num_targets;
  p.tile_chunks = g.tile_chunks;
  p.chunk_rows = g.chunk_rows;
  p.row_keys = g.row_keys;
  p.row_slots = g.row_slots;
  p.dropout = g.dropout;
  p.dropout_key = g.dropout_key;
  p.first_column = g.first_column;
  p.overlaps_previous_kernel = g.overlaps_previous_kernel && g.tile_chunks != nullptr;
  if (!make_maps(g, &p)) return fail("tensor map", "an operand must be 16-byte aligned in address and row");
  return g.block_scales == nullptr ? launch<false>(p, g.blocks, stream) : launch<true>(p, g.blocks, stream);
}
