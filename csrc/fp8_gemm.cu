// The host's side of fp8_gemm.cuh: makes the tensor maps and chooses a kernel. ops/quantised/cuda.py calls it.
#include "fp8_gemm.cuh"

#include "gemm_host.cuh"

extern template int fp8::launch_width<128>(const Fp8Problem&, bool, int, cudaStream_t);
extern template int fp8::launch_width<192>(const Fp8Problem&, bool, int, cudaStream_t);
extern template int fp8::launch_width<256>(const Fp8Problem&, bool, int, cudaStream_t);

// What the caller passes: `Fp8GemmArguments` of ops/lora/cuda_arguments.py, field by field.
struct TloraFp8Gemm {
  TloraGemm gemm;  // x and W are codes; W is [columns_out, depth]
  const float *row_scales, *scales;
  int block;  // scales of W are those of blocks, and x's of 128 k; both lie group beside group
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
  if (g.row_keys != nullptr) return fail("row_keys", "must be null: forward's dropout masks x");
  Fp8Problem p{};
  if (int failed = describe(g, &p)) return failed;
  p.row_scales = f.row_scales;
  p.scales = f.scales;
  p.row_stride = p.column_stride = static_cast<int>((g.depth + kCodes - 1) / kCodes);
  p.row_group_stride = p.group_stride = 1;
  if (!make_code_map(&p.x, g.x, g.rows, g.depth, kBlockRows) ||
      !make_code_map(&p.weight, g.weight, g.columns_out, g.depth, g.tile_columns / 2) || !make_shared_maps(g, &p))
    return fail_maps();
  return launch_any(p, g.tile_columns, f.block, g.blocks, stream);
}
