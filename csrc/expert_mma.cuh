// What the kernels of adapters on routed experts share: copies of 16 bytes, and products of warps.
#pragma once
#include <cstdint>

#include "hopper.cuh"

// The 16 bytes `piece` of a row of `kPieces`, so that 8 neighbours of a column lie in different banks.
template <int kPieces>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  constexpr int rows = kPieces >= 8 ? 1 : 8 / kPieces;  // that 128 bytes hold
  return (row * kPieces + (piece ^ (row / rows % (kPieces >= 8 ? 8 : kPieces)))) * 16;
}

// Zeros where the source does not exist; its address must be one that may be named.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8x8 matrices, a row of one at each lane's address.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// The same, each transposed on the way.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// Adds a product of 16 x 16 and 16 x 8.
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
