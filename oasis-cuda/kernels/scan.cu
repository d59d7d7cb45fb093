// Scores of all complete blocks by a linear summarizer: score(q, rows) = expand(q) . rows, a matrix product of
// [blocks][kRows * HEAD_DIM] with the expanded queries of a group. Every CTA streams an equal run of tiles.
//
// Packed summaries are e4m3 codes with a scale a row. Codes are multiplied in f16, which holds them exactly; so are
// queries, brought into its range by a power of two. Of 4-bit codes, offset + code * step, the products with codes and the
// sums of a grid's queries meet in the end.
//
// -D SUMMARIZER="file" SUMMARY_BYTES=n HEAD_DIM=64|128 GROUP=1..16 QUERIES=1|2 QUERY=0|1 AGGREGATE_MAX=0|1 STAGES=n
#include "copy.cuh"
#include "layout.cuh"
#include "mma.cuh"
#include "work.cuh"
#include SUMMARIZER
#include "summary.cuh"

constexpr int kWarps = 4;
constexpr int kGroups = (GROUP + 7) / 8;  // of 8 query heads, the columns of the product
constexpr int kHeadSteps = HEAD_DIM / 16;
constexpr int kSteps = kRows * kHeadSteps;
// Places of tiles in shared memory: chunks are found by bits of their address.
constexpr u32 kStageBytes = (kTileBytes + kRowsBytes - 1) / kRowsBytes * kRowsBytes;

struct Params {
    const u8* q;          // bf16 [requests][QUERIES][kv_heads * GROUP][HEAD_DIM]
    const u8* summaries;  // [requests][kv_heads][max_tiles] tiles of 16 blocks
    const i32* start;     // [requests + 1] tiles of a KV head before each request
    const i32* blocks;    // [requests] complete blocks
    float* scores;        // [requests][kv_heads][max_tiles * 16]
    i32 requests, kv_heads, max_tiles;
};

// Coordinates `i` of step `k` that a lane multiplies: a matrix load gives two neighbours of bf16, or four codes of a byte,
// or eight of half a byte, of which 0 to 3 and 4 to 7 are multiplied side by side.
DEVICE u32 load_pair(const u32* query, int k, int i) {
    const int lane = threadIdx.x & 3;
    if constexpr (kGridded) {
        const u16* at = reinterpret_cast<const u16*>(query) + k / 2 * kGridWidth + lane * 8 + k % 2 * 2 + i;
        return __ldg(at) | (u32)__ldg(at + 4) << 16;
    }
    return __ldg(query + k * 8 + (kPacked ? lane * 2 + i : lane + i * 4));
}

DEVICE void load_queries(const Params& p, const Cursor& at, u32 (&q)[kGroups][kSteps][2]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
        const int head = g * 8 + (lane >> 2);
        const u64 row = (u64)(at.request * QUERIES + QUERY) * p.kv_heads * GROUP + at.head * GROUP + head;
        const u32* source = reinterpret_cast<const u32*>(p.q + row * HEAD_DIM * 2);
#pragma unroll
        for (int k = 0; k < kHeadSteps; k++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 pair = head < GROUP ? load_pair(source, k, i) : 0u;
#pragma unroll
                for (int part = 0; part < kRows; part++)
                    q[g][part * kHeadSteps + k][i] =
                        bf16_pair(Summarizer::expand(part, bf16_low(pair)), Summarizer::expand(part, bf16_high(pair)));
            }
    }
}

// What the numbers beside a block's rows count for the query heads of a lane's columns.
template <class S = Summarizer> DEVICE void load_weights(const Params& p, const Cursor& at, float (&weights)[kGroups][2]) {
    if constexpr (kHasSide<S>) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            const int head = g * 8 + (lane >> 2);
            const u64 row = (u64)(at.request * QUERIES + QUERY) * p.kv_heads * GROUP + at.head * GROUP + head;
            const u32* source = reinterpret_cast<const u32*>(p.q + row * HEAD_DIM * 2) + (lane & 3);
            float square = 0.0f;
            // NaN is passed over.
            auto add = [&](float q) { square += q == q ? q * q : 0.0f; };
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++) {
                const u32 pair = head < GROUP ? __ldg(source + i * 4) : 0u;
                add(bf16_low(pair));
                add(bf16_high(pair));
            }
            square += __shfl_xor_sync(~0u, square, 1);
            square += __shfl_xor_sync(~0u, square, 2);
            const float weight = S::weight(square);
#pragma unroll
            for (int i = 0; i < 2; i++) weights[g][i] = __shfl_sync(~0u, weight, ((lane & 3) * 2 + i) * 4);
        }
    }
}

// Turns queries into f16 in place; gives what sums are to be multiplied by.
DEVICE float turn_into_halves(u32 (&q)[kGroups][kSteps][2]) {
    float largest = 0.0f;
    auto for_pairs = [&](auto&& change) {
#pragma unroll
        for (int g = 0; g < kGroups; g++)
#pragma unroll
            for (int k = 0; k < kSteps; k++)
#pragma unroll
                for (int i = 0; i < 2; i++) change(q[g][k][i]);
    };
    for_pairs([&](u32& pair) { largest = fmaxf(largest, fmaxf(fabsf(bf16_low(pair)), fabsf(bf16_high(pair)))); });
    // The exponent of the largest becomes that of 2^14; 2^15 is the last one of f16. The factor and its inverse are floats.
    const i32 exponent = (i32)(__reduce_max_sync(~0u, __float_as_uint(largest)) >> 23);
    const i32 factor = min(max(127 + 14 - (exponent - 127), 1), 253);
    const float scale = __uint_as_float((u32)factor << 23);
    for_pairs([&](u32& pair) { pair = half_pair(bf16_low(pair) * scale, bf16_high(pair) * scale); });
    return __uint_as_float((u32)(254 - factor) << 23);
}

// Sums of a lane's columns over the queries of every grid.
template <class S = Summarizer>
DEVICE void sum_queries(const u32 (&q)[kGroups][kSteps][2], float (&totals)[kRows * kHeadGrids][kGroups][2]) {
    if constexpr (kHasGrid<S>) {
#pragma unroll
        for (int grid = 0; grid < kRows * kHeadGrids; grid++)
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                float total = 0.0f;
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const u32 pair = q[g][grid * 2 + k][i];
                        total += bf16_low(pair) + bf16_high(pair);
                    }
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    totals[grid][g][i] = __shfl_sync(~0u, total, ((threadIdx.x & 3) * 2 + i) * 4);
            }
    }
}

// Sums of a tile's rows in 4 bits; `place` is the tile, `tile` a lane's part of a matrix load.
DEVICE void multiply_grids(float (&sums)[kGroups][2][4], const u8* place, u32 tile, const u32 (&q)[kGroups][kSteps][2],
                           const float (&totals)[kRows * kHeadGrids][kGroups][2]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < kRows * kHeadGrids / 2; k++) {
        u32 codes[4];
        load_matrices(codes, tile ^ (k << 5));
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int grid = k * 2 + j;
            float products[kGroups][4] = {};
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u32 rows[4];
#pragma unroll
                for (int i = 0; i < 4; i++) rows[i] = pair_of_codes(codes[j * 2 + i % 2], s * 2 + i / 2);
#pragma unroll
                for (int g = 0; g < kGroups; g++) multiply(products[g], rows, q[g][grid * 2 + s][0], q[g][grid * 2 + s][1]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 word = *reinterpret_cast<const u32*>(
                    place + grid_offset((lane >> 2) + h * 8, grid / kHeadGrids, grid % kHeadGrids));
#pragma unroll
                for (int g = 0; g < kGroups; g++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        sums[g][j][2 * h + i] +=
                            bf16_low(word) * products[g][2 * h + i] + bf16_high(word) * totals[grid][g][i];
            }
        }
    }
}

// Sums of a tile's rows: where packed, those of each row's codes apart; else in two parts.
DEVICE void multiply_tile(float (&sums)[kGroups][2][4], u32 tile, const u32 (&q)[kGroups][kSteps][2]) {
    if constexpr (kPacked) {
#pragma unroll
        for (int c = 0; c < HEAD_DIM / 32; c++)
#pragma unroll
            for (int part = 0; part < kRows; part++) {
                u32 codes[4], rows[2][4];
                load_matrices(codes, tile ^ ((part * (HEAD_DIM / 32) + c) << 5));
                // Two chunks of 16 codes, two halves of the blocks each.
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int h = 0; h < 2; h++) halves_of_codes(codes[j * 2 + h], rows[j][h], rows[j][2 + h]);
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int g = 0; g < kGroups; g++) {
                        const u32(&pair)[2] = q[g][part * kHeadSteps + c * 2 + j];
                        multiply_halves(sums[g][part], rows[j], pair[0], pair[1]);
                    }
            }
    } else {
#pragma unroll
        for (int k = 0; k < kSteps; k++) {
            u32 rows[4];
            load_matrices(rows, tile ^ (k << 5));
#pragma unroll
            for (int g = 0; g < kGroups; g++) multiply(sums[g][k & 1], rows, q[g][k][0], q[g][k][1]);
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
    u8* ring = shared + warp * STAGES * kStageBytes;
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
            stream_in(shared_address(ring + stage * kStageBytes),
                      p.summaries + ((u64)ahead.pair() * p.max_tiles + ahead.index()) * kTileBytes, kTileBytes,
                      shared_address(&barriers[warp][stage]));
        if (ahead.at + kWarps < end) ahead.advance(kWarps); else ahead.at = end;
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) copy_next(i);

    const u32 row = lane & 15, offset = row * kRowsBytes + (((lane >> 4) ^ turn_of(row)) << 4);
    u32 q[kGroups][kSteps][2];
    float inverse = 1.0f, weights[kGroups][2], totals[kRows * kHeadGrids][kGroups][2];
    i32 stage = 0, parity = 0, blocks = 0;
    bool fresh = true;
    while (true) {
        if (fresh) {
            load_queries(p, at, q);
            if constexpr (kPacked) inverse = turn_into_halves(q);
            load_weights(p, at, weights);
            sum_queries(q, totals);
            blocks = __ldg(p.blocks + at.request);
        }
        barrier_wait(shared_address(&barriers[warp][stage]), parity);
        const u8* const place = ring + stage * kStageBytes;
        float sums[kGroups][2][4] = {};
        if constexpr (kGridded) multiply_grids(sums, place, shared_address(place) + offset, q, totals);
        else multiply_tile(sums, shared_address(place) + offset, q);
        float scales[2][2];  // of the blocks of a lane and their rows
        if constexpr (kPacked) {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int part = 0; part < kRows; part++)
                    scales[h][part] = bf16_float(*reinterpret_cast<const u16*>(
                        place + scale_offset((lane >> 2) + h * 8, part)));
        }
        float sides[2];
        if constexpr (kSided) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                sides[h] = *reinterpret_cast<const float*>(place + side_offset((lane >> 2) + h * 8));
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
                    if (g * 8 + (lane & 3) * 2 + i < GROUP) {
                        float sum = sums[g][0][2 * h + i];
                        if constexpr (kPacked) sum *= inverse * scales[h][0];
                        if constexpr (kPacked && kRows == 2) sum += sums[g][1][2 * h + i] * inverse * scales[h][1];
                        if constexpr (!kPacked) sum += sums[g][1][2 * h + i];
                        if constexpr (kSided) sum += sides[h] * weights[g][i];
                        score = join(score, sum);
                    }
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
