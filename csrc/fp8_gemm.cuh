// out = scaled(codes of x, codes of W) + rank part: the GEMM of lora_gemm.cuh with a base of e4m3 codes.
//
// Semantics, for row m and output column n, with x and W read as the values of their codes:
//   channel: base[m, n] = sum_k (x[m, k] W[n, k]) row_scales[m] column_scales[n]
//   block:   base[m, n] = sum_k (x[m, k] W[n, k] row_scales[m, k / 128] block_scales[n / 128, k / 128])
//   out = base + bias + rank part, the rank part being that of lora_gemm.cuh, in bf16; dropout has masked x before
// Both operands are contiguous along k. In the input gradient W is not: fp8_dgrad.cuh computes that.
//
// The hardware sums products of 8 bits with about 14 bits and cuts off the rest: over 14,336 products of one sign it loses
// 21 % of the value, 0.56 % in sums of 512 and 0.06 % in sums of 128. So sums of 128 k (a stage of the ring) are added, in
// ascending order of k, to a second set of accumulators in fp32. Rank chunks follow, behind the base and its scales. A row's
// result depends on its own codes, its scales and W alone.
//
// A warp loads its 16 rows of a stage by `ldmatrix`, whose registers are a product's first operand as they are, and
// multiplies them by slices of W's columns: while one slice is multiplied, the slice before is added. The whole result of
// a tile has shared memory of its own: the next tile's products run while it is stored.
//
// A unit of its own compiles each width (fp8_gemm_*.cu), fp8_gemm.cu checks and chooses.
#pragma once
#include "gemm_tiles.cuh"
#include "wgmma_registers.cuh"

namespace fp8 {

using namespace gemm;

constexpr int kCodes = 128;  // of a row in a stage of the ring, and of a block of W's scales
constexpr int kSteps = 4;    // wgmmas that a slice of a stage takes
constexpr uint64_t kStep = 32 >> 4;

// Stages of the ring, beside which there is room for a whole tile of the result.
template <int BN>
constexpr int kRingOf = BN == 256 ? 3 : BN == 192 ? 4 : 5;

// Columns of a slice.
template <int BN>
constexpr int kSliceOf = BN == 192 ? 96 : 64;

struct Fp8Problem : Problem {
  const float* row_scales;  // [rows], or strided in groups of 128 k
  const float* scales;      // of W: [columns_out] or null, or of 128 x 128 blocks
  // Blocks: elements between rows and between groups of 128 k.
  int row_stride, row_group_stride, column_stride, group_stride;
};

template <int BN>
struct Fp8Shared : Shared<BN, kRingOf<BN>, BN / 64> {
  float2 column_scales[2][BN / 2];  // warpgroup
  float row_scales[2][64];
};

__device__ __forceinline__ float load_float(const float* at) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(at));
  return value;
}

// Volatile, or the compiler loads the scales of a tile before its products and has no registers for them.
__device__ __forceinline__ float2 load_shared_two(const float2* at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(shared_address(at)) : "memory");
  return v;
}

// They arrive while the warpgroup multiplies.
template <int kBytes>
__device__ __forceinline__ void copy_later(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes)
               : "memory");
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <int BN>
struct Producer : Copies<BN, kRingOf<BN>, BN / 64> {
  using Base = Copies<BN, kRingOf<BN>, BN / 64>;
  using Base::p, Base::shared, Base::block, Base::ring;

  __device__ void run(int first_tile, int step) {
    constexpr int half = BN / 2;  // of W's rows: the other block of the cluster copies the others
    for (int index = first_tile; index < p.row_tiles * p.column_tiles; index += step) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows + block * kBlockRows;
      const int column = tile.column_tile * BN;
      for (int k = 0; k < p.depth; k += kCodes) {
        uint64_t* full = this->begin_stage(Shared<BN>::kStageBytes);
        load_tile(shared.x[ring.stage], &p.x, full, k, row);
        load_tile_both(shared.weight[ring.stage] + block * half * kCodes, &p.weight, full, k, column + block * half);
        ring.advance();
      }
      this->load_chunks(tile, column);
    }
    this->drain();
  }
};

template <int BN, bool kBlock>
struct Consumer : Sums<BN, kRingOf<BN>, BN / 64> {
  using Base = Sums<BN, kRingOf<BN>, BN / 64>;
  using Base::p, Base::warpgroup, Base::thread, Base::ring, Base::waited;
  static constexpr int N = kSliceOf<BN>;
  static constexpr int kSlices = BN / N;
  static_assert(kSlices % 2 == 0 && (!kBlock || 128 % N == 0), "slices take turns, within a block of scales");
  using Codes = uint32_t[kSteps][4];
  using Parts = float[2][N / 2];

  const Fp8Problem& q;
  Fp8Shared<BN>& own;

  // Blocks: what a slice's products are multiplied by when they are added, of the two rows of the accumulators' layout.
  struct Factors {
    float first = 1.f, second = 1.f;
  };

  __device__ void run(int first_tile, int step, int block) {
    float sums[BN / 2];
    for (int index = first_tile; index < p.row_tiles * p.column_tiles; index += step) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows + block * kBlockRows + warpgroup * 64;
      const int column = tile.column_tile * BN;
      const Chunks chunks(p, tile);
      copy_scales(row, column);
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) sums[i] = 0.f;
      multiply(sums, row, column);
      if (thread == 0) store_wait_read<0>();
      copies_wait();
      warpgroup_sync(warpgroup);
      if constexpr (!kBlock) scale(sums);
      add_chunks(sums, chunks);
      store_whole(sums, row, column);
    }
    if (thread == 0) store_wait_all();
  }

  // All threads have read those of the tile before: store_whole waits for them.
  __device__ void copy_scales(int row, int column) {
    if constexpr (kBlock) return;
    if (thread < 64) copy_later<4>(&own.row_scales[warpgroup][thread], q.row_scales + min(row + thread, p.rows - 1));
    if (thread >= BN / 2) return;
    float2* to = &own.column_scales[warpgroup][thread];
    if (q.scales == nullptr)
      *to = float2{1.f, 1.f};
    else
      copy_later<8>(to, q.scales + min(column + thread * 2, p.columns_out - 2));
  }

  // Of a thread's first codes in a stage; those of later steps are 32 bytes further, before the swizzle.
  __device__ uint32_t codes_place() {
    const int lane = thread % 32;
    const int row = lane % 16;
    uint32_t place = (warpgroup * 64 + thread / 32 * 16 + row) * kCodes + (lane / 16 ^ row % 8) * 16;
    asm volatile("" : "+r"(place));  // kept, not computed again in every stage
    return place;
  }

  __device__ void load_codes(Codes& a, uint32_t place) {
    const uint32_t at = shared_address(own.x[ring.stage]) + place;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3])
                   : "r"(at ^ i * 32)
                   : "memory");
  }

  __device__ void begin_slice(float (&part)[N / 2], const Codes& a, int slice) {
    const uint64_t b = operand(own.weight[ring.stage] + slice * N * kCodes, 0);
    settle(part);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) wgmma_codes<N>(part, a[i], b + i * kStep, i > 0);
    wgmma_commit();
  }

  __device__ void add(float (&sums)[BN / 2], float (&part)[N / 2], int slice, const Factors& f) {
    settle(part);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      float& sum = sums[slice * N / 2 + i];
      sum = kBlock ? fmaf(part[i], i % 4 < 2 ? f.first : f.second, sum) : sum + part[i];
    }
  }

  // Blocks: scales of a thread's two rows and of W: those of a stage are loaded beside the products of the one before.
  struct Scales {
    int row[2], block, last_block;  // where the next ones are
    float of_row[2], of_block[(BN + 127) / 128];
    Factors factors[(BN + 127) / 128];  // of the slices that are yet to be added
  };

  __device__ void begin_scales(Scales& s, int row, int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = min(row + thread / 32 * 16 + thread % 32 / 4 + half * 8, p.rows - 1);
      s.row[half] = r * (kBlock ? q.row_stride : 1);
    }
    // `- (row < 0)` is 0, and no constant of the warp to the compiler: one it would keep in a register of the warp, and
    // wait there for the scale as soon as it has been asked for.
    s.block = column / kCodes * q.column_stride - (s.row[0] < 0);
    s.last_block = (p.columns_out - 1) / kCodes - column / kCodes;
    if constexpr (kBlock) load_scales(s);
  }

  __device__ void load_scales(Scales& s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) s.of_row[half] = load_float(q.row_scales + s.row[half]);
    if constexpr (kBlock) {
      const float* at = q.scales + s.block;
#pragma unroll
      for (int i = 0; i < BN / 128; ++i) s.of_block[i] = load_float(at + min(i, s.last_block) * q.column_stride);
    }
  }

  __device__ void next_scales(Scales& s, bool more) {
    if constexpr (kBlock) {
#pragma unroll
      for (int i = 0; i < BN / 128; ++i) s.factors[i] = {s.of_row[0] * s.of_block[i], s.of_row[1] * s.of_block[i]};
      // Without a branch, behind which the compiler would move what it has loaded, and wait for it.
      s.row[0] += more ? q.row_group_stride : 0;
      s.row[1] += more ? q.row_group_stride : 0;
      s.block += more ? q.group_stride : 0;
      load_scales(s);
    }
  }

  __device__ Factors factors_of(const Scales& s, int slice) { return s.factors[kBlock ? slice * N / 128 : 0]; }

  // A stage's last slice is added beside the first one of the next.
  __device__ void multiply(float (&sums)[BN / 2], int row, int column) {
    Parts parts;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) parts[1][i] = 0.f;
    Scales scales;
    begin_scales(scales, row, column);
    const uint32_t place = codes_place();
    Codes a;
#pragma unroll 1
    for (int k = 0; k < p.depth; k += kCodes)
      stage(sums, parts, a, place, scales, k + kCodes < p.depth);
    add(sums, parts[1], kSlices - 1, factors_of(scales, kSlices - 1));
  }

  __device__ void stage(float (&sums)[BN / 2], Parts& parts, Codes& a, uint32_t place, Scales& s, bool more) {
    barrier_wait(&own.full[ring.stage], ring.parity);
    load_codes(a, place);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      begin_slice(parts[i % 2], a, i);
      wgmma_wait<1>();
      const int before = (i + kSlices - 1) % kSlices;
      add(sums, parts[(i + 1) % 2], before, factors_of(s, before));
      if (i == 0) next_scales(s, more);
    }
    // The compiler does not understand products that are in flight from one round of a loop to the next.
    wgmma_wait<0>();
    settle(parts[1]);
    this->release(ring.stage);
    ring.advance();
  }

  // By row, then by column: the product of two scales may be too small for a float.
  __device__ void scale(float (&sums)[BN / 2]) {
    const int lane = thread % 32;
    const float* rows = &own.row_scales[warpgroup][thread / 32 * 16 + lane / 4];
    const float first = rows[0], second = rows[8];
#pragma unroll
    for (int eight = 0; eight < BN / 8; ++eight) {
      const float2 s = load_shared_two(&own.column_scales[warpgroup][eight * 4 + lane % 4]);
      float* four = sums + eight * 4;
      four[0] = four[0] * first * s.x;
      four[1] = four[1] * first * s.y;
      four[2] = four[2] * second * s.x;
      four[3] = four[3] * second * s.y;
    }
  }

  __device__ void add_chunks(float (&sums)[BN / 2], Chunks chunks) {
    for (int begin = chunks.begin; begin < chunks.end; begin += kStageChunks) {
      const int count = min(kStageChunks, chunks.end - begin);
      barrier_wait(&own.full[ring.stage], ring.parity);
      uint64_t a = operand(own.x[ring.stage] + warpgroup * kPanel, kPanel);
      uint64_t b = operand(own.weight[ring.stage], kPanel);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        add_chunk(sums, a, b);
        a += kChunk * 128 >> 4;
        b += kChunk * 128 >> 4;
      }
      this->release(ring.stage);
      ring.advance();
    }
  }

  // A chunk is one product of the tensor cores, onto the sums: zeros in the rows of others change no bit.
  __device__ void add_chunk(float (&sums)[BN / 2], uint64_t a, uint64_t b) {
    auto& panels = reinterpret_cast<float(&)[BN / 64][32]>(sums);
    settle(sums);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < BN / 64; ++panel) wgmma<64, 1, 1>(panels[panel], a, b + panel * (kPanel >> 4), 1);
    wgmma_commit();
    wgmma_wait<0>();
    settle(sums);
  }

  __device__ void store_whole(float (&sums)[BN / 2], int row, int column) {
#pragma unroll
    for (int panel = 0; panel < BN / 64; ++panel) this->put_panel(own.out[warpgroup][panel], sums, panel, column);
    fence_shared_for_copies();
    warpgroup_sync(warpgroup);
    if (thread != 0) return;
    if (!waited) wait_for_previous();  // it may still use the memory that is now `out`
    waited = true;
#pragma unroll 1
    for (int panel = 0; panel < BN / 64; ++panel)
      store_tile(own.out[warpgroup][panel], &p.out, column + panel * 64, row);
    store_commit();
  }
};

template <int BN, bool kBlock>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    fp8_gemm(const __grid_constant__ Fp8Problem p) {
  extern __shared__ uint8_t unaligned[];
  auto& shared = *reinterpret_cast<Fp8Shared<BN>*>((reinterpret_cast<uintptr_t>(unaligned) + 1023) & ~1023ull);
  const int block = cluster_block();
  start_barriers(shared);
  const int first_tile = blockIdx.x / 2, step = gridDim.x / 2;
  if (!p.overlaps_previous_kernel) wait_for_previous();
  if (threadIdx.x < 128) {
    keep_registers<40>();
    if (threadIdx.x == 0) Producer<BN>{{p, shared, block}}.run(first_tile, step);
  } else {
    take_registers<232>();
    const int warpgroup = threadIdx.x / 128 - 1;
    Consumer<BN, kBlock>{{p, shared, warpgroup, static_cast<int>(threadIdx.x % 128)}, p, shared}.run(first_tile, step, block);
  }
}

template <int BN, bool kBlock>
int launch(const Fp8Problem& problem, int blocks, cudaStream_t stream) {
  constexpr int bytes = sizeof(Fp8Shared<BN>) + 1024;
  static_assert(bytes <= 232448, "what a block of a Hopper GPU may have");
  return launch_kernel<fp8_gemm<BN, kBlock>>(problem, blocks, kThreads, bytes, 0, stream, kPriority);
}

template <int BN>
int launch_width(const Fp8Problem& problem, bool block, int blocks, cudaStream_t stream) {
  if (!block) return launch<BN, false>(problem, blocks, stream);
  if constexpr (BN % 128 == 0) return launch<BN, true>(problem, blocks, stream);
  return fail("tile_columns", "must be 128 or 256 for scales of blocks");
}

}  // namespace fp8
