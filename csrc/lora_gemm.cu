// The host's side of lora_gemm.cuh: makes the tensor maps and chooses a kernel. ops/lora/cuda_calls.py calls it.
#include "lora_gemm.cuh"

#include "gemm_host.cuh"

extern template int gemm::launch_width<128>(const Problem&, bool, int, cudaStream_t);
extern template int gemm::launch_width<192>(const Problem&, bool, int, cudaStream_t);
extern template int gemm::launch_width<256>(const Problem&, bool, int, cudaStream_t);

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

bool make_maps(const TloraGemm& g, Problem* p) {
  const bool made = make_map(&p->x, g.x, g.rows, g.depth, kBlockRows) && make_shared_maps(g, p);
  return made && (g.transposed ? make_map(&p->weight, g.weight, g.columns_out, g.depth, g.tile_columns / 2)
                               : make_map(&p->weight, g.weight, g.depth, g.columns_out, 64));
}

}  // namespace

TLORA_EXPORT const char* tlora_message() { return message; }

TLORA_EXPORT int tlora_gemm_size() { return sizeof(TloraGemm); }

TLORA_EXPORT int tlora_gemm(const TloraGemm* arguments, cudaStream_t stream) {
  const TloraGemm& g = *arguments;
  if (g.rows == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  Problem p{};
  if (int failed = describe(g, &p)) return failed;
  if (!make_maps(g, &p)) return fail_maps();
  return launch_any(p, g.tile_columns, g.transposed, g.blocks, stream);
}
