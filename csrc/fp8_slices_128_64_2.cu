// A variant of the FP8 kernels to measure: tiles of 128 columns, slices of 64, 2 sets of registers of x.
#include "fp8_slices.cuh"

template int fp8::launch_slices<128, 64, 2>(const Fp8Problem&, bool, int, cudaStream_t);
