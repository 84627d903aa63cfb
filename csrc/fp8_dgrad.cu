// The host's side of fp8_dgrad.cuh. ops/quantised/cuda.py calls it.
#include "fp8_dgrad.cuh"

#include "gemm_host.cuh"

// What the caller passes: `DgradArguments` of ops/lora/cuda_arguments.py, field by field.
struct TloraFp8Dgrad {
  TloraGemm gemm;  // x are the codes of dy, and W is [depth, columns_out]; tile_columns 256
  const float *row_scales, *block_scales;
};

TLORA_EXPORT int tlora_fp8_dgrad_size() { return sizeof(TloraFp8Dgrad); }

TLORA_EXPORT int tlora_fp8_dgrad(const TloraFp8Dgrad* arguments, cudaStream_t stream) {
  using namespace fp8_dgrad;
  const TloraFp8Dgrad& f = *arguments;
  const TloraGemm& g = f.gemm;
  if (g.rows == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  if (g.tile_columns != kClusterFeatures) return fail("tile_columns", "must be 256");
  DgradProblem p{};
  if (int failed = describe(g, &p)) return failed;
  p.row_scales = f.row_scales;
  p.block_scales = f.block_scales;
  if (!make_code_map(&p.x, g.x, g.rows, g.depth, kHalfRows) ||
      !make_code_map(&p.weight, g.weight, g.depth, g.columns_out, kCodes) || !make_shared_maps(g, &p))
    return fail_maps();
  if (p.block_scales == nullptr) return launch<false>(p, g.blocks, stream);
  return launch<true>(p, g.blocks, stream);
}
