// A variant of the FP8 kernels to measure: tiles of 256 columns, slices of 64, 1 sets of registers of x.
#include "fp8_slices.cuh"

template int fp8::launch_slices<256, 64, 1>(const Fp8Problem&, bool, int, cudaStream_t);
