// Collectives over NVLink that copy engines transport: runs a list of steps on one stream. Which steps make an
// all-reduce, and why no copy meets another's reader, is said in parallel/exchange.py.
//
// Multiprocessors only add up (`sum_slices`); copies, signals and waits are the stream's. Measured on 4 H200s against
// signals by a kernel of one warp: the same within noise, but for a piece whose GEMMs held that kernel up.
#include "host.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

constexpr int kMaxRanks = 8;  // MAX_RANKS of parallel/exchange.py
constexpr int kSumThreads = 512;
enum Kind { kCopy, kExchange, kSum };
enum Base { kNowhere = -3, kX = -2, kOut = -1 };  // else: the area of that rank

// `ExchangeStep` of ops/lora/cuda_arguments.py, field by field.
struct TloraStep {
  int kind, phase, sources, from_base, to_base, also_base;
  int64_t from, to, also, bytes;
};

// `ExchangeArguments` of ops/lora/cuda_arguments.py, field by field.
struct TloraExchange {
  void *x, *out;
  char* areas[kMaxRanks];      // the lane's staging memory on each rank, as this process sees it
  uint32_t* flags[kMaxRanks];  // the lane's signals on each rank, [phase][sender]
  const TloraStep* steps;
  int64_t slot_bytes;
  int num_steps, rank, size, dtype, blocks, device;
};

namespace {

struct SumProblem {
  const void* sources[kMaxRanks];
  void *to, *also;  // also may be null
  int64_t count;
};

template <typename T>
__device__ __forceinline__ float widen(T value) {
  return static_cast<float>(value);
}

template <typename T>
__device__ __forceinline__ T narrow(float value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(value);
  else if constexpr (std::is_same_v<T, half>) return __float2half_rn(value);
  else return value;
}

template <typename T>
union Vector {
  uint4 bits;
  T values[16 / sizeof(T)];
};

// to[i] = also[i] = sources[0][i] + sources[1][i] + ..., in fp32 and in this order. `to` or `also` may be a source:
// an element is read and written by one thread.
template <typename T, int kSources, bool kVectors>
__global__ void __launch_bounds__(kSumThreads) sum_slices(const __grid_constant__ SumProblem p) {
  constexpr int kWidth = kVectors ? 16 / sizeof(T) : 1;
  using Piece = std::conditional_t<kVectors, Vector<T>, T>;
  const int64_t pieces = p.count / kWidth, step = static_cast<int64_t>(gridDim.x) * kSumThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  for (int64_t i = first; i < pieces; i += step) {
    Piece pieces_of[kSources];
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if constexpr (kVectors) pieces_of[s].bits = static_cast<const uint4*>(p.sources[s])[i];
      else pieces_of[s] = static_cast<const T*>(p.sources[s])[i];
    }
    Piece sum;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const auto value = [&](int s) {
        if constexpr (kVectors) return widen(pieces_of[s].values[k]);
        else return widen(pieces_of[s]);
      };
      float total = value(0);
#pragma unroll
      for (int s = 1; s < kSources; ++s) total += value(s);
      if constexpr (kVectors) sum.values[k] = narrow<T>(total);
      else sum = narrow<T>(total);
    }
    if constexpr (kVectors) {
      static_cast<uint4*>(p.to)[i] = sum.bits;
      if (p.also != nullptr) static_cast<uint4*>(p.also)[i] = sum.bits;
    } else {
      static_cast<T*>(p.to)[i] = sum;
      if (p.also != nullptr) static_cast<T*>(p.also)[i] = sum;
    }
  }
}

template <typename T, int kSources, bool kVectors>
int launch_sum(const SumProblem& problem, int max_blocks, cudaStream_t stream) {
  const int64_t pieces = kVectors ? problem.count * static_cast<int64_t>(sizeof(T)) / 16 : problem.count;
  const int64_t wanted = (pieces + kSumThreads - 1) / kSumThreads;
  const int blocks = static_cast<int>(wanted < max_blocks ? wanted : max_blocks);
  sum_slices<T, kSources, kVectors><<<blocks, kSumThreads, 0, stream>>>(problem);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? 0 : fail("sum", cudaGetErrorString(status));
}

template <typename T, bool kVectors>
int launch_sum(const SumProblem& problem, int sources, int blocks, cudaStream_t stream) {
  switch (sources) {
    case 1: return launch_sum<T, 1, kVectors>(problem, blocks, stream);
    case 2: return launch_sum<T, 2, kVectors>(problem, blocks, stream);
    case 3: return launch_sum<T, 3, kVectors>(problem, blocks, stream);
    case 4: return launch_sum<T, 4, kVectors>(problem, blocks, stream);
    case 5: return launch_sum<T, 5, kVectors>(problem, blocks, stream);
    case 6: return launch_sum<T, 6, kVectors>(problem, blocks, stream);
    case 7: return launch_sum<T, 7, kVectors>(problem, blocks, stream);
    case 8: return launch_sum<T, 8, kVectors>(problem, blocks, stream);
  }
  return fail("sources", "must be 1 to 8");
}

template <typename T>
int launch_sum(SumProblem problem, int64_t bytes, int sources, int blocks, cudaStream_t stream) {
  problem.count = bytes / static_cast<int64_t>(sizeof(T));
  uintptr_t places = reinterpret_cast<uintptr_t>(problem.to) | reinterpret_cast<uintptr_t>(problem.also) | bytes;
  for (int s = 0; s < sources; ++s) places |= reinterpret_cast<uintptr_t>(problem.sources[s]);
  return places % 16 == 0 ? launch_sum<T, true>(problem, sources, blocks, stream)
                          : launch_sum<T, false>(problem, sources, blocks, stream);
}

char* place(const TloraExchange& e, int base, int64_t offset) {
  if (base == kNowhere) return nullptr;
  char* begin = base == kX ? static_cast<char*>(e.x) : base == kOut ? static_cast<char*>(e.out) : e.areas[base];
  return begin + offset;
}

int copy(const TloraExchange& e, const TloraStep& s, cudaStream_t stream) {
  const cudaError_t status = cudaMemcpyAsync(place(e, s.to_base, s.to), place(e, s.from_base, s.from), s.bytes,
                                             cudaMemcpyDeviceToDevice, stream);
  return status == cudaSuccess ? 0 : fail("copy", cudaGetErrorString(status));
}

// Own rows and what the others have put into this rank's slots, in rank order.
int sum(const TloraExchange& e, const TloraStep& s, cudaStream_t stream) {
  SumProblem problem{};
  for (int r = 0; r < s.sources; ++r) problem.sources[r] = e.areas[e.rank] + r * e.slot_bytes;
  problem.sources[s.sources == 1 ? 0 : e.rank] = place(e, s.from_base, s.from);
  problem.to = place(e, s.to_base, s.to);
  problem.also = place(e, s.also_base, s.also);
  switch (e.dtype) {
    case 0: return launch_sum<__nv_bfloat16>(problem, s.bytes, s.sources, e.blocks, stream);
    case 1: return launch_sum<half>(problem, s.bytes, s.sources, e.blocks, stream);
    case 2: return launch_sum<float>(problem, s.bytes, s.sources, e.blocks, stream);
  }
  return fail("dtype", "must be bf16, fp16 or fp32");
}

auto batch_mem_op() {
  static const auto found = driver_function<decltype(&cuStreamBatchMemOp)>("cuStreamBatchMemOp");
  return found;
}

CUstreamBatchMemOpParams write_flag(uint32_t* flag, uint32_t value) {
  CUstreamBatchMemOpParams op{};
  op.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  op.writeValue.address = reinterpret_cast<CUdeviceptr>(flag);
  op.writeValue.value = value;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // after what the stream has written, for every device
  return op;
}

CUstreamBatchMemOpParams wait_flag(uint32_t* flag) {
  CUstreamBatchMemOpParams op{};
  op.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  op.waitValue.address = reinterpret_cast<CUdeviceptr>(flag);
  op.waitValue.value = 1;
  op.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  return op;
}

int exchange(const TloraExchange& e, int phase, cudaStream_t stream) {
  if (batch_mem_op() == nullptr) return fail("driver", "has no cuStreamBatchMemOp; CUDA 12 or newer is needed");
  CUstreamBatchMemOpParams ops[3 * kMaxRanks];
  int count = 0;
  for (int p = 0; p < e.size; ++p)
    if (p != e.rank) ops[count++] = write_flag(e.flags[p] + phase * kMaxRanks + e.rank, 1);
  for (int p = 0; p < e.size; ++p) {
    if (p == e.rank) continue;
    uint32_t* flag = e.flags[e.rank] + phase * kMaxRanks + p;
    ops[count++] = wait_flag(flag);
    ops[count++] = write_flag(flag, 0);
  }
  return batch_mem_op()(stream, count, ops, 0) == CUDA_SUCCESS ? 0 : fail("signals", "cuStreamBatchMemOp failed");
}

int run(const TloraExchange& e, const TloraStep& s, cudaStream_t stream) {
  switch (s.kind) {
    case kCopy: return copy(e, s, stream);
    case kSum: return sum(e, s, stream);
    case kExchange: return exchange(e, s.phase, stream);
  }
  return fail("step", "is of no known kind");
}

}  // namespace

TLORA_EXPORT int tlora_step_size() { return sizeof(TloraStep); }

TLORA_EXPORT int tlora_exchange_size() { return sizeof(TloraExchange); }

TLORA_EXPORT int tlora_exchange(const TloraExchange* arguments, cudaStream_t stream) {
  const TloraExchange& e = *arguments;
  if (e.size < 2 || e.size > kMaxRanks) return fail("size", "must be 2 to 8");
  if (int failed = prepare(e.device)) return failed;
  for (int i = 0; i < e.num_steps; ++i)
    if (int failed = run(e, e.steps[i], stream)) return failed;
  return 0;
}
