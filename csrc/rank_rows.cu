// Rank-sized rows from wide ones: s = scaling drop(x) A^T and dS = scaling / (1 - p) dy B.
//
// Semantics, for row t of the item's segment and rank row j of its chunks:
//   out[t, j] = scaling[slot] / (1 - p) sum_k mask(in[t, column(k)]) F[j, k]
// over the places k of the target's arena F; dS masks nothing, but what reads it does. Written twice: transposed into
// ext, [chunk 16, 256] a chunk, with zeros in rows of other adapters (what lora_gemm.cuh reads), and as rows (what
// rank_sums.cu reads).
//
// A cluster computes 128 rows; its blocks share k and sum their parts, in order of blocks, through each other's
// shared memory.
#include "host.cuh"
#include "rank_ring.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kBlockRows = 128;
constexpr int kStripRows = 16;
constexpr int kStripBytes = kStripRows * 128;

struct Problem {
  CUtensorMap in, in_strip, factors[kMaxTargets];  // the input in boxes of 128 rows and of 16
  Columns columns[kMaxTargets];  // of the input that each target reads; stride 0: all of them
  int depth[kMaxTargets];        // places of each target's arena
  const int* items;
  int item_fields;
  const int* chunks;  // ext chunks, pair by pair
  void *ext, *rows;
  int row_width;
  int first_row;  // of the micro-batch that the input begins with
  const float *scaling, *dropout;  // [slots]; dropout null: none
  const int* row_keys;             // null: dropout does not mask `in`
  int dropout_key, first_column;
};

struct Item {
  int row, begin, end;  // of the block and of the segment
  int tile_column;      // the block's first column in ext
  int target, slot, count, factor_row, first_chunk, rank_column;

  __device__ explicit Item(const int* at)
      : row(at[0]), begin(at[1]), end(at[2]), tile_column(at[3]), target(at[4]), slot(at[5]), count(at[6]),
        factor_row(at[7]), first_chunk(at[8]), rank_column(at[9]) {}

  __device__ bool owns(int t) const { return t >= begin && t < end; }
  __device__ bool any() const { return begin < row + kBlockRows && end > row; }
  __device__ bool all() const { return begin <= row && end >= row + kBlockRows; }

  // Strips of 16 rows with rows of the segment: only these are read. What lies in the others' shared memory makes
  // rows that nobody keeps.
  __device__ int first_strip() const { return max(begin - row, 0) / kStripRows; }
  __device__ int end_strip() const { return (min(end - row, kBlockRows) + kStripRows - 1) / kStripRows; }
  __device__ int input_bytes() const { return (end_strip() - first_strip()) * kStripBytes; }
};

struct Range {  // of steps of 64 places that a block sums
  int begin, end;

  __device__ Range(int depth, int part, int parts) {
    const int steps = (depth + kDepth - 1) / kDepth;
    begin = steps * part / parts;
    end = steps * (part + 1) / parts;
  }
};

__device__ void fill(const Problem& p, const Item& item, Range range, RankRing& ring, Place place) {
  const Columns& columns = p.columns[item.target];
  for (int step = range.begin; step < range.end; ++step, place.advance()) {
    uint8_t* to = place.begin_fill(ring, item.input_bytes() + item.count * kChunk * 128);
    const int k = step * kDepth;
    const int column = columns.stride == 0 ? k : output_column(columns, k);
    if (item.all()) {
      load_tile(to, &p.in, &ring.full[place.stage], column, item.row - p.first_row);
    } else {
      for (int strip = item.first_strip(); strip < item.end_strip(); ++strip)
        load_tile(to + strip * kStripBytes, &p.in_strip, &ring.full[place.stage], column,
                  item.row - p.first_row + strip * kStripRows);
    }
    for (int i = 0; i < item.count; ++i)
      load_tile(to + 2 * kPanel + i * kChunk * 128, &p.factors[item.target], &ring.full[place.stage], k,
                item.factor_row + i * kChunk);
  }
}

template <int N>
__device__ void write(const Problem& p, const Item& item, int part, int parts, const float* sums, int thread) {
  const float dropout = p.dropout == nullptr ? 0.f : p.dropout[item.slot];
  const float scale = p.scaling[item.slot] / (1.f - dropout);
  const int warp = thread / 32, lane = thread % 32;
  auto* ext = static_cast<__nv_bfloat16*>(p.ext);
  // Pairs of columns whose parts are read at once: one by one, each would wait.
  constexpr int batch = N < 64 ? N / 8 : 8;
  for (int first = part; first < N / 4; first += batch * parts) {
    float two[batch][2] = {};
    int chunks[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      const int chunk = (first + j * parts) / 4;
      chunks[j] = chunk < item.count ? __ldg(p.chunks + item.first_chunk + chunk) : -1;
    }
    for (int block = 0; block < parts; ++block) {
      float found[batch][2];
#pragma unroll
      for (int j = 0; j < batch; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float* at = sums + (2 * (first + j * parts) + e) * kMultipliers + thread;
          found[j][e] = chunks[j] < 0 ? 0.f : load_from(at, block);
        }
#pragma unroll
      for (int j = 0; j < batch; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) two[j][e] += found[j][e];
    }
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      if (chunks[j] < 0) continue;
      const int q = first + j * parts;
      const int column = q / 2 * 8 + lane % 4 * 2;
      const int local = warp * 16 + lane / 4 + q % 2 * 8;
      const int t = item.row + local;
      const bool inside = item.owns(t);
      const uint32_t packed = inside ? pack_pair(two[j][0] * scale, two[j][1] * scale) : 0;
      if (inside)
        *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.rows) + static_cast<int64_t>(t) * p.row_width +
                                     item.rank_column + column) = packed;
      uint16_t* to = reinterpret_cast<uint16_t*>(ext) +
                     (static_cast<int64_t>(chunks[j]) * kChunk + column % kChunk) * kTileRows + item.tile_column + local;
      to[0] = static_cast<uint16_t>(packed);
      to[kTileRows] = static_cast<uint16_t>(packed >> 16);
    }
  }
}

template <int N, bool kDropout>
__device__ void multiply(const Problem& p, const Item& item, Range range, RankRing& ring, Place place, int thread) {
  const int warpgroup = thread / 128;
  float sums[N / 2];
#pragma unroll
  for (float& s : sums) s = 0.f;
  uint32_t key = 0;
  Mask mask(0.f);
  if constexpr (kDropout) {
    mask = Mask(p.dropout[item.slot]);
    const int t = item.row + thread / 2;
    key = item.owns(t) ? mix32(p.row_keys[t] ^ p.dropout_key) : 0;
    __syncwarp();
  }
  int previous = -1;
  for (int step = range.begin; step < range.end; ++step, place.advance()) {
    barrier_wait(&ring.full[place.stage], place.parity);
    uint8_t* panel = place.at(ring) + warpgroup * kPanel;
    if (kDropout && mask.dropped != 0) {
      drop_panel(panel, thread % 128, mask, key, seed_steps(p.first_column + step * kDepth));
      finish_writes(warpgroup);
    }
    const uint64_t a = operand(panel, 0);
    const uint64_t b = operand(place.at(ring) + 2 * kPanel, 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / kChunk; ++i) {
      const uint64_t along = i * (kChunk * 2 >> 4);
      wgmma<N, 0, 0>(sums, a + along, b + along, 1);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && thread % 32 == 0) barrier_arrive(&ring.empty[previous]);
    previous = place.stage;
  }
  wgmma_wait<0>();
  // Every copy has landed and every product is read once both warpgroups are here: the ring is free for the sums.
  multipliers_sync();
  float* parts = reinterpret_cast<float*>(ring.bytes);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) parts[i * kMultipliers + thread] = sums[i];
}

template <bool kDropout>
__global__ void __launch_bounds__(kRankThreads, 2) rank_rows(const __grid_constant__ Problem p) {
  RankRing& ring = rank_ring();
  init_ring(ring);
  wait_for_previous();
  let_next_start();
  const int part = cluster_block(), parts = cluster_size();
  const int* at = p.items + static_cast<int64_t>(blockIdx.x / parts) * p.item_fields;
  if (at[0] < 0) return;
  const Item item(at);
  const int thread = threadIdx.x;
  const int width = kernel_width(item.count);
  float* sums = reinterpret_cast<float*>(ring.bytes);
  if (item.any()) {
    const Range range(p.depth[item.target], part, parts);
    const Place place(2 * kPanel + width * 128);  // rows beyond the chunks are read, and go nowhere
    if (thread < kMultipliers) {
      switch (width) {
        case 16: multiply<16, kDropout>(p, item, range, ring, place, thread); break;
        case 32: multiply<32, kDropout>(p, item, range, ring, place, thread); break;
        case 64: multiply<64, kDropout>(p, item, range, ring, place, thread); break;
        default: multiply<128, kDropout>(p, item, range, ring, place, thread);
      }
    } else if (thread == kMultipliers) {
      fill(p, item, range, ring, place);
    }
  } else if (thread < kMultipliers) {
    for (int i = 0; i < width / 2; ++i) sums[i * kMultipliers + thread] = 0.f;
  }
  __syncwarp();
  cluster_sync();
  if (thread < kMultipliers) {
    switch (width) {
      case 16: write<16>(p, item, part, parts, sums, thread); break;
      case 32: write<32>(p, item, part, parts, sums, thread); break;
      case 64: write<64>(p, item, part, parts, sums, thread); break;
      default: write<128>(p, item, part, parts, sums, thread);
    }
  }
  __syncwarp();
  cluster_sync();  // others may still read this block's parts
}

template <bool kDropout>
int launch(const Problem& problem, int items, int parts, cudaStream_t stream) {
  return launch_kernel<rank_rows<kDropout>>(problem, items * parts, kRankThreads, sizeof(RankRing) + 1024, parts,
                                               stream);
}

}  // namespace

// What the caller passes: `RowsArguments` of ops/lora/cuda_arguments.py, field by field.
struct TloraRows {
  const void* in;
  void *ext, *rows;
  const int *items, *chunks, *row_keys;
  const float *scaling, *dropout;
  int64_t num_rows, in_columns;
  Factors factors;
  int num_targets, num_items, item_fields, parts, row_width, first_row, dropout_key, first_column, device;
};

TLORA_EXPORT int tlora_rows_size() { return sizeof(TloraRows); }

TLORA_EXPORT int tlora_rows(const TloraRows* arguments, cudaStream_t stream) {
  const TloraRows& g = *arguments;
  if (g.num_items == 0) return 0;
  if (int failed = prepare(g.device)) return failed;
  Problem p{};
  bool made = make_map(&p.in, g.in, g.num_rows, g.in_columns, kBlockRows) &&
              make_map(&p.in_strip, g.in, g.num_rows, g.in_columns, kStripRows);
  for (int i = 0; i < g.num_targets; ++i) {
    const Factors& f = g.factors;
    made = made && make_arena_map(&p.factors[i], f.at[i], f.rows[i], f.width[i], kChunk);
    p.columns[i] = f.columns[i];
    p.depth[i] = static_cast<int>(f.width[i]);
  }
  if (!made) return fail("tensor map", "an operand must have rows, 16-byte aligned in address and size");
  p.items = g.items;
  p.item_fields = g.item_fields;
  p.chunks = g.chunks;
  p.ext = g.ext;
  p.rows = g.rows;
  p.row_width = g.row_width;
  p.first_row = g.first_row;
  p.scaling = g.scaling;
  p.dropout = g.dropout;
  p.row_keys = g.row_keys;
  p.dropout_key = g.dropout_key;
  p.first_column = g.first_column;
  return g.row_keys ? launch<true>(p, g.num_items, g.parts, stream) : launch<false>(p, g.num_items, g.parts, stream);
}
