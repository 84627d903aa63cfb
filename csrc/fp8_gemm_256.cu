// The FP8 kernels of tiles of 256 columns: a unit of their own, compiled beside the others.
#include "fp8_gemm.cuh"

template int fp8::launch_width<256>(const Fp8Problem&, bool, int, cudaStream_t);
