// The host's side of fp8_gemm.cuh: makes the tensor maps and chooses a kernel. ops/quantised/cuda_products.py calls it.
#include "fp8_gemm.cuh"

#include "gemm_host.cuh"

extern template int fp8::launch_width<128>(const Fp8Problem&, bool, int, cudaStream_t);
extern template int fp8::launch_width<192>(const Fp8Problem&, bool, int, cudaStream_t);
extern template int fp8::launch_width<256>(const Fp8Problem&, bool, int, cudaStream_t);

// What the caller passes: `Fp8GemmArguments` of ops/lora/cuda/arguments.py, field by field.
struct TloraFp8Gemm {
  TloraGemm gemm;  // x and W are codes; W is [columns_out, depth]
  const float *row_scales, *scales;
  int row_stride, row_group_stride, column_stride, group_stride;
  int block;  // the kind of W's scales
};

namespace {

using namespace fp8;

int launch_any(const Fp8Problem& p, int width, bool block, int blocks, cudaStream_t stream) {
  switch (width) {
    case 128: return launch_width<128>(p, block, blocks, stream);
    case 192: return launch_width<192>(p, block, blocks, stream);
    case 256: return launch_width<256>(p, block, blocks, stream);
  }
  return fail("tile_columns", "must be 128, 192 or 256");
}

}  // namespace

TLORA_EXPORT int tlora_fp8_gemm_size() { return sizeof(TloraFp8Gemm); }

TLORA_EXPORT int tlora_fp8_gemm(const TloraFp8Gemm* arguments, cudaStream_t stream) {
  const TloraFp8Gemm& f = *arguments;
  const TloraGemm& g = f.gemm;
  if (g.rows == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  if (!f.block && f.scales != nullptr && g.row_keys != nullptr)
    return fail("dropout", "must come without scales of columns, which would scale the rank part");
  Fp8Problem p{};
  if (int failed = describe(g, &p)) return failed;
  p.row_scales = f.row_scales;
  p.scales = f.scales;
  p.row_stride = f.row_stride;
  p.row_group_stride = f.row_group_stride;
  p.column_stride = f.column_stride;
  p.group_stride = f.group_stride;
  if (!make_code_map(&p.x, g.x, g.rows, g.depth, kBlockRows) ||
      !make_code_map(&p.weight, g.weight, g.columns_out, g.depth, g.tile_columns / 2) || !make_shared_maps(g, &p))
    return fail_maps();
  return launch_any(p, g.tile_columns, f.block, g.blocks, stream);
}
