// The transpose of a matrix of codes of 8 bits: [rows, columns] -> [columns, rows].
//
// A block transposes 128 x 128 bytes through shared memory: a thread reads 16 bytes of 4 rows each, transposes 4 x 4
// bytes in registers, and writes 16 bytes of 4 columns each. Words of shared memory hold 4 rows of a column; 16-byte
// chunks of a column are swizzled, so that no access has a bank conflict.
#include "hopper.cuh"
#include "host.cuh"

// What the caller passes: `TransposeArguments` of ops/lora/cuda/arguments.py, field by field.
struct TloraTranspose {
  const uint8_t* source;
  uint8_t* target;
  int64_t rows, columns;  // multiples of 16
  int device;
};

namespace {

constexpr int kSide = 128;
constexpr int kThreads = 256;  // each 16 columns of 4 rows

__device__ uint4 row_of(const TloraTranspose& t, int64_t row, int64_t column) {
  if (row >= t.rows || column >= t.columns) return uint4{};
  return *reinterpret_cast<const uint4*>(t.source + row * t.columns + column);
}

// Byte i of the results' word j is byte j of row i's word.
__device__ void transpose_bytes(const uint32_t (&row)[4], uint32_t (&column)[4]) {
  const uint32_t low01 = __byte_perm(row[0], row[1], 0x5140), high01 = __byte_perm(row[0], row[1], 0x7362);
  const uint32_t low23 = __byte_perm(row[2], row[3], 0x5140), high23 = __byte_perm(row[2], row[3], 0x7362);
  column[0] = __byte_perm(low01, low23, 0x5410);
  column[1] = __byte_perm(low01, low23, 0x7632);
  column[2] = __byte_perm(high01, high23, 0x5410);
  column[3] = __byte_perm(high01, high23, 0x7632);
}

__global__ void __launch_bounds__(kThreads) transpose_codes(const __grid_constant__ TloraTranspose t) {
  __shared__ alignas(16) uint32_t words[kSide][kSide / 4];  // column, four rows
  const int chunk = threadIdx.x % 8, four = threadIdx.x / 8;  // 16 columns, 4 rows
  const int tiles = static_cast<int>((t.columns + kSide - 1) / kSide);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x / tiles) * kSide;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x % tiles) * kSide;
  wait_for_previous();  // it may still use the memory that is now `target`
  let_next_start();
  uint32_t rows[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = row_of(t, first_row + four * 4 + i, first_column + chunk * 16);
    rows[0][i] = v.x, rows[1][i] = v.y, rows[2][i] = v.z, rows[3][i] = v.w;
  }
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint32_t columns[4];
    transpose_bytes(rows[word], columns);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[chunk * 16 + word * 4 + i][four ^ chunk * 4] = columns[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = i * 32 + four;
    const int64_t to_row = first_column + column, to_column = first_row + chunk * 16;
    if (to_row >= t.columns || to_column >= t.rows) continue;
    const uint4 v = *reinterpret_cast<const uint4*>(&words[column][(chunk ^ column / 16) * 4]);
    *reinterpret_cast<uint4*>(t.target + to_row * t.rows + to_column) = v;
  }
}

}  // namespace

TLORA_EXPORT int tlora_transpose_size() { return sizeof(TloraTranspose); }

TLORA_EXPORT int tlora_transpose(const TloraTranspose* arguments, cudaStream_t stream) {
  const TloraTranspose& t = *arguments;
  if (t.rows % 16 != 0 || t.columns % 16 != 0) return fail("sizes", "must be multiples of 16");
  if (int failed = prepare(t.device)) return failed;
  const int64_t tiles = ((t.rows + kSide - 1) / kSide) * ((t.columns + kSide - 1) / kSide);
  if (tiles == 0) return 0;
  return launch_kernel<transpose_codes>(t, static_cast<int>(tiles), kThreads, 0, 0, stream);
}
