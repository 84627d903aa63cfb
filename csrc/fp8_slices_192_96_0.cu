// A variant of the FP8 kernels to measure: tiles of 192 columns, slices of 96, no registers of x.
#include "fp8_slices.cuh"

template int fp8::launch_slices<192, 96, 0>(const Fp8Problem&, bool, int, cudaStream_t);
