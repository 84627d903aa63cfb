// fp8_gemm.cuh with x's codes in registers: while one slice of W's columns is multiplied, the slice before is added.
//
// A warp loads its 16 rows of a stage by `ldmatrix` (tests/unit/ops/quantised/test_gemm_fragments.py: this is a product's
// first operand as it is) and multiplies them by slices of W. Scales of rows and columns are applied once a tile, where
// they are not of blocks. The whole result of a tile lies in shared memory of its own: the next tile's products run
// while it is stored.
#pragma once
#include "fp8_gemm.cuh"
#include "wgmma_registers.cuh"

namespace fp8 {

// Later: they arrive while the warpgroup multiplies.
template <int kBytes>
__device__ __forceinline__ void copy_later(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes) : "memory");
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// So that warpgroups store at different times. (A barrier in the loop, for this, would serialize products.)
__device__ __forceinline__ void wait_cycles(int cycles) {
  asm volatile(
      "{\n.reg .pred early;\n.reg .u32 begin, now;\n"
      "mov.u32 begin, %%clock;\n"
      "WAIT:\n"
      "mov.u32 now, %%clock;\n"
      "sub.u32 now, now, begin;\n"
      "setp.lt.u32 early, now, %0;\n"
      "@early bra WAIT;\n}\n" ::"r"(cycles)
      : "memory");
}

// Stages of the ring, beside which there is room for a whole tile of the result.
template <int BN>
constexpr int kRingOf = BN == 256 ? 3 : 4;

template <int BN>
struct SliceShared : Shared<BN, kRingOf<BN>, BN / 64> {
  float2 column_scales[2][BN / 2];  // warpgroup
  float row_scales[2][64];
};

template <int BN, bool kDropout>
struct SliceProducer : Copies<BN, kRingOf<BN>, BN / 64> {
  using Base = Copies<BN, kRingOf<BN>, BN / 64>;
  using Base::p, Base::shared, Base::block, Base::ring;

  __device__ void run(int first_tile, int step) {
    constexpr int half = BN / 2;  // of W's rows: the other block of the cluster copies the others
    for (int index = first_tile; index < p.row_tiles * p.column_tiles; index += step) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows + block * kBlockRows;
      const int column = tile.column_tile * BN;
      if (kDropout) this->load_chunks(tile, column);
      for (int k = 0; k < p.depth; k += kCodes) {
        uint64_t* full = this->begin_stage(Shared<BN>::kStageBytes);
        load_tile(shared.x[ring.stage], &p.x, full, k, row);
        load_tile_both(shared.weight[ring.stage] + block * half * kCodes, &p.weight, full, k, column + block * half);
        ring.advance();
      }
      if (!kDropout) this->load_chunks(tile, column);
    }
    this->drain();
  }
};

// N columns a slice, kSets of x's registers.
template <int BN, int N, int kSets, bool kBlock, bool kDropout>
struct SliceConsumer : Sums<BN, kRingOf<BN>, BN / 64> {
  using Base = Sums<BN, kRingOf<BN>, BN / 64>;
  using Base::p, Base::warpgroup, Base::thread, Base::ring, Base::previous, Base::waited;
  static constexpr int kSlices = BN / N;
  static constexpr bool kScaled = kBlock || kDropout;  // while slices are added, not at the end
  static_assert(kSlices % 2 == 0 && (!kBlock || 128 % N == 0), "slices take turns, within a block of scales");
  using Codes = uint32_t[4][4];
  using Parts = float[2][N / 2];

  const Fp8Problem& q;
  SliceShared<BN>& own;
  

  // What a slice's products are multiplied by when they are added.
  struct Factors {
    float first = 1.f, second = 1.f;
  };

  __device__ void run(int first_tile, int step, int block) {
    float sums[BN / 2];
    wait_cycles(q.lag * warpgroup * 512);
    for (int index = first_tile; index < p.row_tiles * p.column_tiles; index += step) {
      const Tile tile(p, index);
      const int row = tile.row_tile * kTileRows + block * kBlockRows + warpgroup * 64;
      const int column = tile.column_tile * BN;
      const Chunks chunks(p, tile);
      copy_scales(row, column);
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) sums[i] = 0.f;
      if constexpr (kDropout) {
        add_chunks(sums, chunks);
        if (chunks.begin < chunks.end) this->drop(sums, row, column);
      }
      multiply(sums, row, column);
      if (thread == 0) store_wait_read<0>();
      copies_wait();
      warpgroup_sync(warpgroup);
      if constexpr (!kScaled) scale(sums);
      if constexpr (!kDropout) add_chunks(sums, chunks);
      store_whole(sums, row, column);
    }
    if (thread == 0) store_wait_all();
  }

  // All threads have read those of the tile before: store_whole waits for them.
  __device__ void copy_scales(int row, int column) {
    if constexpr (kScaled) return;
    if (thread < 64) copy_later<4>(&own.row_scales[warpgroup][thread], q.row_scales + min(row + thread, p.rows - 1));
    if (thread >= BN / 2) return;
    float2* to = &own.column_scales[warpgroup][thread];
    if (q.scales == nullptr)
      store_shared_two(to, float2{1.f, 1.f});
    else
      copy_later<8>(to, q.scales + min(column + thread * 2, p.columns_out - 2));
  }

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
    for (int i = 0; i < kSteps; ++i) {
      if constexpr (kSets > 0)
        wgmma_codes<N>(part, a[i], b + i * kStep, i > 0);
      else
        wgmma_e4m3<N>(part, operand(own.x[ring.stage] + warpgroup * kPanel, 0) + i * kStep, b + i * kStep, i > 0);
    }
    wgmma_commit();
  }

  __device__ void add(float (&sums)[BN / 2], float (&part)[N / 2], int slice, const Factors& f) {
    settle(part);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      float& sum = sums[slice * N / 2 + i];
      sum = kScaled ? fmaf(part[i], i % 4 < 2 ? f.first : f.second, sum) : sum + part[i];
    }
  }

  // Scales by row, and by block of W's columns where they have any.
  struct Scales {
    const float *of_row[2], *of_block;
    int last_block;
    float row[2], block[(BN + 127) / 128];
    Factors last;  // of the slice that is yet to be added
  };

  __device__ void begin_scales(Scales& s, int row, int column) {
    if constexpr (!kScaled) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = min(row + thread / 32 * 16 + thread % 32 / 4 + half * 8, p.rows - 1);
      s.of_row[half] = q.row_scales + r * static_cast<int64_t>(kBlock ? q.row_stride : 1);
      s.row[half] = load_float(s.of_row[half]);
    }
    s.of_block = q.scales;
    if constexpr (kBlock) s.of_block += column / kCodes * static_cast<int64_t>(q.column_stride);
    s.last_block = (p.columns_out - 1) / kCodes - column / kCodes;
  }

  __device__ void next_scales(Scales& s) {
    if constexpr (!kBlock) return;
#pragma unroll
    for (int i = 0; i < BN / 128; ++i) s.block[i] = load_float(s.of_block + min(i, s.last_block) * q.column_stride);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      s.row[half] = load_float(s.of_row[half]);
      s.of_row[half] += q.row_group_stride;
    }
    s.of_block += q.group_stride;
  }

  __device__ Factors factors(const Scales& s, int slice) {
    if constexpr (kBlock) return {s.row[0] * s.block[slice * N / 128], s.row[1] * s.block[slice * N / 128]};
    if constexpr (kDropout) return {s.row[0], s.row[1]};
    return {};
  }

  // A stage's last slice is added beside the first one of the next.
  __device__ void multiply(float (&sums)[BN / 2], int row, int column) {
    Parts parts;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) parts[1][i] = 0.f;
    Scales scales;
    begin_scales(scales, row, column);
    const uint32_t place = codes_place();
    Codes a[kSets + (kSets == 0)];
    int k = 0;
    if constexpr (kSets == 2) {
      for (; k + kCodes < p.depth; k += 2 * kCodes) {
        stage<false, true>(sums, parts, a[0], place, scales);
        stage<true, false>(sums, parts, a[1], place, scales);
      }
    }
#pragma unroll 1
    for (; k < p.depth; k += kCodes) stage<false, false>(sums, parts, a[0], place, scales);
    add(sums, parts[1], kSlices - 1, scales.last);
  }

  // kAfter: the stage before has a slice in flight; kStays: so will this one. The compiler does not understand products
  // that are in flight from one round of a loop to the next.
  template <bool kAfter, bool kStays>
  __device__ void stage(float (&sums)[BN / 2], Parts& parts, Codes& a, uint32_t place, Scales& scales) {
    next_scales(scales);
    barrier_wait(&own.full[ring.stage], ring.parity);
    if constexpr (kSets > 0) load_codes(a, place);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      begin_slice(parts[i % 2], a, i);
      wgmma_wait<1>();
      if (kAfter && i == 0) this->release(previous);
      const Factors f = i == 0 ? scales.last : factors(scales, i - 1);
      add(sums, parts[(i + 1) % 2], i == 0 ? kSlices - 1 : i - 1, f);
    }
    scales.last = factors(scales, kSlices - 1);
    previous = ring.stage;
    if constexpr (!kStays) {
      wgmma_wait<0>();
      settle(parts[1]);
      this->release(previous);
    }
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

  // Each chunk is a sum of its own: in one of the tensor cores' sums chunks would be divided otherwise with other
  // neighbours.
  __device__ void add_chunks(float (&sums)[BN / 2], Chunks chunks) {
    float parts[2][32];
    for (int begin = chunks.begin; begin < chunks.end; begin += kStageChunks) {
      const int count = min(kStageChunks, chunks.end - begin);
      barrier_wait(&own.full[ring.stage], ring.parity);
      uint64_t a = operand(own.x[ring.stage] + warpgroup * kPanel, kPanel);
      uint64_t b = operand(own.weight[ring.stage], kPanel);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int panel = 0; panel <= BN / 64; ++panel) {
          if (panel < BN / 64) {
            settle(parts[panel % 2]);
            wgmma_fence();
            wgmma<64, 1, 1>(parts[panel % 2], a, b + panel * (kPanel >> 4), 0);
            wgmma_commit();
          }
          if (panel == 0) continue;
          if (panel < BN / 64)
            wgmma_wait<1>();
          else
            wgmma_wait<0>();
          settle(parts[(panel + 1) % 2]);
#pragma unroll
          for (int j = 0; j < 32; ++j) sums[(panel - 1) * 32 + j] += parts[(panel + 1) % 2][j];
        }
        a += kChunk * 128 >> 4;
        b += kChunk * 128 >> 4;
      }
      this->release(ring.stage);
      ring.advance();
    }
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

template <int BN, int N, int kSets, bool kBlock, bool kDropout>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    fp8_slices(const __grid_constant__ Fp8Problem p) {
  extern __shared__ uint8_t unaligned[];
  auto& shared = *reinterpret_cast<SliceShared<BN>*>((reinterpret_cast<uintptr_t>(unaligned) + 1023) & ~1023ull);
  const int block = cluster_block();
  start_barriers(shared);
  const int first_tile = blockIdx.x / 2, step = gridDim.x / 2;
  if (!p.overlaps_previous_kernel) wait_for_previous();
  if (threadIdx.x < 128) {
    keep_registers<40>();
    if (threadIdx.x == 0) SliceProducer<BN, kDropout>{{p, shared, block}}.run(first_tile, step);
  } else {
    take_registers<232>();
    const int warpgroup = threadIdx.x / 128 - 1;
    SliceConsumer<BN, N, kSets, kBlock, kDropout>{
        {p, shared, warpgroup, static_cast<int>(threadIdx.x % 128)}, p, shared}
        .run(first_tile, step, block);
  }
}

template <int BN, int N, int kSets, bool kBlock, bool kDropout>
int launch_one(const Fp8Problem& problem, int blocks, cudaStream_t stream) {
  constexpr int bytes = sizeof(SliceShared<BN>) + 1024;
  static_assert(bytes <= 232448, "what a block of a Hopper GPU may have");
  return launch_kernel<fp8_slices<BN, N, kSets, kBlock, kDropout>>(problem, blocks, kThreads, bytes, 0, stream,
                                                                    kPriority);
}

template <int BN, int N, int kSets>
int launch_slices(const Fp8Problem& problem, bool block, int blocks, cudaStream_t stream) {
  const bool dropout = problem.row_keys != nullptr;
  if (block) {
    if constexpr (128 % N == 0 && BN % 128 == 0)
      return dropout ? launch_one<BN, N, kSets, true, true>(problem, blocks, stream)
                     : launch_one<BN, N, kSets, true, false>(problem, blocks, stream);
    return fail("tile_columns", "must be 128 or 256 for scales of blocks");
  }
  return dropout ? launch_one<BN, N, kSets, false, true>(problem, blocks, stream)
                 : launch_one<BN, N, kSets, false, false>(problem, blocks, stream);
}

}  // namespace fp8
