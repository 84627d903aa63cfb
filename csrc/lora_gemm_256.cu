// The kernels of tiles of 256 columns: a unit of their own, compiled beside the others.
#include "lora_gemm.cuh"

template int gemm::launch_width<256>(const Problem&, bool, int, cudaStream_t);
