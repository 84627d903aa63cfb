// The host's side of every kernel: errors as text, the driver's functions, tensor maps.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <cstdio>

#define TLORA_EXPORT extern "C" __attribute__((visibility("default")))

inline thread_local char message[256];

inline int fail(const char* what, const char* why) {
  snprintf(message, sizeof message, "%s: %s", what, why);
  return 1;
}

// A function of the driver as of CUDA 12.0, or null.
template <typename Function>
Function driver_function(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
  return status == cudaSuccess ? reinterpret_cast<Function>(address) : nullptr;
}

inline auto encoder() {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return encode;
}

// A map of a row-major matrix, read or written in boxes of `box_rows` x 128 bytes, swizzled; reads beyond it are zeros.
inline bool make_map_of(CUtensorMapDataType type, int element_bytes, CUtensorMap* map, const void* at, int64_t rows,
                        int64_t columns, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * element_bytes};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / element_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  return encoder()(map, type, 2, const_cast<void*>(at), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The map of a bf16 matrix.
inline bool make_map(CUtensorMap* map, const void* at, int64_t rows, int64_t columns, int box_rows) {
  return make_map_of(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, map, at, rows, columns, box_rows);
}

// The map of an arena of factors. One without rows has none, as the driver describes no empty matrix, and nothing reads it:
// no job here has that target, though others had when the arenas were laid out.
inline bool make_arena_map(CUtensorMap* map, const void* at, int64_t rows, int64_t width, int box_rows) {
  return rows == 0 || make_map(map, at, rows, width, box_rows);
}

// The map of a matrix of codes of 8 bits.
inline bool make_code_map(CUtensorMap* map, const void* at, int64_t rows, int64_t columns, int box_rows) {
  return make_map_of(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, map, at, rows, columns, box_rows);
}

// Checks the driver, and makes the device current: this library has a CUDA runtime of its own, which does not know
// the device that torch works on.
inline int prepare(int device) {
  if (encoder() == nullptr) return fail("driver", "has no cuTensorMapEncodeTiled; CUDA 12 or newer is needed");
  return cudaSetDevice(device) == cudaSuccess ? 0 : fail("device", "cannot be set");
}

// Lets a kernel have as much shared memory as it asks for: once a device, not in every launch.
template <auto kKernel>
cudaError_t allow_shared_memory(int shared_bytes) {
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  const uint64_t bit = 1ull << (device % 64);
  if (status != cudaSuccess || (allowed.load() & bit)) return status;
  status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status == cudaSuccess) allowed.fetch_or(bit);
  return status;
}

// Launches with clusters (0: as the kernel says) and lets the kernel start before the previous one has ended. A kernel
// has the same `shared_bytes` in every launch. `priority`: the stream's, or one above it (negative).
template <auto kKernel, typename Problem>
int launch_kernel(const Problem& problem, int blocks, int threads, int shared_bytes, int cluster, cudaStream_t stream,
                  int priority = 0) {
  cudaError_t status = allow_shared_memory<kKernel>(shared_bytes);
  if (status != cudaSuccess) return fail("shared memory", cudaGetErrorString(status));
  cudaLaunchAttribute attributes[3] = {};
  int count = 1;
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  if (cluster != 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  if (priority != 0) {
    attributes[count].id = cudaLaunchAttributePriority;
    attributes[count++].val.priority = priority;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  status = cudaLaunchKernelEx(&config, kKernel, problem);
  return status == cudaSuccess ? 0 : fail("launch", cudaGetErrorString(status));
}
