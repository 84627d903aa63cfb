// The FP8 kernels of tiles of 192 columns: a unit of their own, compiled beside the others.
#include "fp8_gemm.cuh"

template int fp8::launch_width<192>(const Fp8Problem&, bool, int, cudaStream_t);
