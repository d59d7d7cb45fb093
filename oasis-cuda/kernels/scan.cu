// Scores of all complete blocks by a linear summarizer: score(q, rows) = expand(q) . rows, a matrix product of
// [blocks][kRows * HEAD_DIM] with the expanded queries of a group. Every CTA streams an equal run of tiles.
//
// -D SUMMARIZER="file" HEAD_DIM=64|128 GROUP=1..16 QUERIES=1|2 QUERY=0|1 AGGREGATE_MAX=0|1 STAGES=n
#include "copy.cuh"
#include "layout.cuh"
#include "mma.cuh"
#include "work.cuh"
#include SUMMARIZER

constexpr int kWarps = 4;
constexpr int kGroups = (GROUP + 7) / 8;  // of 8 query heads, the columns of the product
constexpr int kSteps = Summarizer::kRows * HEAD_DIM / 16;
constexpr u32 kRowBytes = Summarizer::kRows * kKeyRowBytes;
constexpr u32 kTileBytes = kBlock * kRowBytes;

struct Params {
    const u8* q;          // bf16 [requests][QUERIES][kv_heads * GROUP][HEAD_DIM]
    const u8* summaries;  // [requests][kv_heads][max_tiles] tiles of 16 blocks
    const i32* start;     // [requests + 1] tiles of a KV head before each request
    const i32* blocks;    // [requests] complete blocks
    float* scores;        // [requests][kv_heads][max_tiles * 16]
    i32 requests, kv_heads, max_tiles;
};

DEVICE void load_queries(const Params& p, const Cursor& at, u32 (&q)[kGroups][kSteps][2]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
        const int head = g * 8 + (lane >> 2);
        const u64 row = (u64)(at.request * QUERIES + QUERY) * p.kv_heads * GROUP + at.head * GROUP + head;
        const u32* source = reinterpret_cast<const u32*>(p.q + row * HEAD_DIM * 2) + (lane & 3);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 pair = head < GROUP ? __ldg(source + k * 8 + i * 4) : 0u;
#pragma unroll
                for (int part = 0; part < Summarizer::kRows; part++)
                    q[g][part * (HEAD_DIM / 16) + k][i] =
                        bf16_pair(Summarizer::expand(part, bf16_low(pair)), Summarizer::expand(part, bf16_high(pair)));
            }
    }
}

// Joins two scores of a group.
DEVICE float join(float a, float b) { return AGGREGATE_MAX ? fmaxf(a, b) : a + b; }

extern "C" __global__ void __launch_bounds__(kWarps * 32, 2) scan_summaries(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ __align__(8) u64 barriers[kWarps][STAGES];
    const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Starts starts(p.start, p.requests);
    const i32 total = starts.total * p.kv_heads;
    // Warp w of a CTA takes tiles begin + w, begin + w + kWarps, ...
    const Parts parts(total, gridDim.x);
    const i32 begin = parts.begin(blockIdx.x) + warp, end = parts.begin(blockIdx.x + 1);
    if (begin >= end) return;
    u8* ring = shared + warp * STAGES * kTileBytes;
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(shared_address(&barriers[warp][i]), 1);
        barrier_init_fence();
    }
    __syncwarp();

    Cursor ahead(starts, p.kv_heads, begin);
    Cursor at = ahead;
    auto copy_next = [&](int stage) {
        if (ahead.at >= end) return;
        if (lane == 0)
            stream_in(shared_address(ring + stage * kTileBytes),
                      p.summaries + ((u64)ahead.pair() * p.max_tiles + ahead.index()) * kTileBytes, kTileBytes,
                      shared_address(&barriers[warp][stage]));
        if (ahead.at + kWarps < end) ahead.advance(kWarps); else ahead.at = end;
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) copy_next(i);

    const u32 row = lane & 15, offset = row * kRowBytes + (((lane >> 4) ^ (row & 7)) << 4);
    u32 q[kGroups][kSteps][2];
    i32 stage = 0, parity = 0, blocks = 0;
    bool fresh = true;
    while (true) {
        if (fresh) {
            load_queries(p, at, q);
            blocks = __ldg(p.blocks + at.request);
        }
        barrier_wait(shared_address(&barriers[warp][stage]), parity);
        const u32 tile = shared_address(ring + stage * kTileBytes) + offset;
        float sums[kGroups][2][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; k++) {
            u32 rows[4];
            load_matrices(rows, tile ^ (k << 5));
#pragma unroll
            for (int g = 0; g < kGroups; g++) multiply(sums[g][k & 1], rows, q[g][k][0], q[g][k][1]);
        }
        __syncwarp();
        copy_next(stage);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // NaN as the start of a maximum: it is the answer only where every score is NaN.
            float score = AGGREGATE_MAX ? __uint_as_float(0x7fffffffu) : 0.0f;
#pragma unroll
            for (int g = 0; g < kGroups; g++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (g * 8 + (lane & 3) * 2 + i < GROUP)
                        score = join(score, sums[g][0][2 * h + i] + sums[g][1][2 * h + i]);
            score = join(score, __shfl_xor_sync(~0u, score, 1));
            score = join(score, __shfl_xor_sync(~0u, score, 2));
            const i32 block = at.index() * kBlock + (lane >> 2) + h * 8;
            if ((lane & 3) == 0 && block < blocks) p.scores[(u64)at.pair() * p.max_tiles * kBlock + block] = score;
        }
        if (at.at + kWarps >= end) break;
        const i32 before = at.head_end;
        at.advance(kWarps);
        fresh = at.head_end != before;
    }
}
