// The kernels of tiles of 192 columns: a unit of their own, compiled beside the others.
#include "lora_gemm.cuh"

template int gemm::launch_width<192>(const Problem&, bool, int, cudaStream_t);
