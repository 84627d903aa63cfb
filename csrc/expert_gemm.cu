// The host's side of expert_gemm.cuh: makes the tensor maps and chooses a kernel. ops/lora/cuda_calls.py calls it.
#include "expert_gemm.cuh"

namespace {

using namespace gemm;

constexpr int kColumns = 256;

}  // namespace

// What the caller passes: `ExpertGemmArguments` of ops/lora/cuda_arguments.py, field by field.
struct TloraExpertGemm {
  const void *x, *weight, *s, *factors;
  void* out;
  const int *units, *num_units;
  int64_t rows, columns_out, depth, experts, rank_rows;  // 0: no rank part
  int transposed;  // W is [experts, columns_out, depth], else [experts, depth, columns_out]
  int blocks, device;
};

namespace {

bool make_maps(const TloraExpertGemm& g, ExpertProblem* p) {
  bool made = make_map(&p->x, g.x, g.rows, g.depth, 64) && make_map(&p->out, g.out, g.rows, g.columns_out, 64);
  made = made && (g.transposed ? make_map(&p->weight, g.weight, g.experts * g.columns_out, g.depth, kColumns / 2)
                               : make_map(&p->weight, g.weight, g.experts * g.depth, g.columns_out, 64));
  if (g.rank_rows == 0) return made;
  made = made && make_map(&p->s, g.s, g.rows, g.rank_rows, 64);
  return made && make_map(&p->factors[0], g.factors, g.experts * g.rank_rows, g.columns_out, 64);
}

template <bool kTransposed>
int launch(const ExpertProblem& problem, int blocks, cudaStream_t stream) {
  return launch_kernel<expert_gemm<kColumns, kTransposed>>(problem, blocks, kThreads, sizeof(Shared<kColumns>) + 1024, 0,
                                                              stream, kPriority);
}

}  // namespace

TLORA_EXPORT int tlora_expert_gemm_size() { return sizeof(TloraExpertGemm); }

TLORA_EXPORT int tlora_expert_gemm(const TloraExpertGemm* arguments, cudaStream_t stream) {
  const TloraExpertGemm& g = *arguments;
  if (g.rows == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  ExpertProblem p{};
  p.rows = static_cast<int>(g.rows);
  p.columns_out = static_cast<int>(g.columns_out);
  p.depth = static_cast<int>(g.depth);
  p.out_rows = static_cast<__nv_bfloat16*>(g.out);
  p.units = g.units;
  p.num_units = g.num_units;
  p.weight_rows = static_cast<int>(g.transposed ? g.columns_out : g.depth);
  p.rank_rows = static_cast<int>(g.rank_rows);
  if (!make_maps(g, &p)) return fail("tensor map", "an operand must have rows, 16-byte aligned in address and size");
  return g.transposed ? launch<true>(p, g.blocks, stream) : launch<false>(p, g.blocks, stream);
}
