// The kernels of tiles of 128 columns: a unit of their own, compiled beside the others.
#include "lora_gemm.cuh"

template int gemm::launch_width<128>(const Problem&, bool, int, cudaStream_t);
