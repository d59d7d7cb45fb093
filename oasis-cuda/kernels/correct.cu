// Which requests choose their blocks again before attention, as the queries of some KV head have turned away from those of
// the step before, by exactly the rule of oasis-core; and the queries kept for the next step. One CTA a request; the last
// to be done adds up what scan and selection work on.
//
// -D HEAD_DIM=64|128 GROUP=1..16
#include "prelude.cuh"

constexpr i32 kBlock = 16;
constexpr int kWarps = 8;
constexpr int kHeadPairs = HEAD_DIM / 2;

struct Params {
    const u32* q;         // bf16 [requests][kv_heads * GROUP][HEAD_DIM] of this step
    u32* kept;            // as q: those of the step before; updated
    const i32* position;  // [requests] position of this step's token; -1 for padding, whose queries are left alone
    i32* ranked;          // [requests] what selection takes for the newest token: it completes no block; -1: none chooses
                          // again. Null: queries are kept and nothing else is done
    i32* blocks;          // [requests] complete blocks to be ranked, 0 where none chooses again
    i32* tile_start;      // [requests + 1] summary tiles of a KV head before each request
    u32* arrived;         // [1] zero between launches
    u64* corrected;       // [1] how many have chosen again, since the start
    i32 requests, kv_heads;
    float min_similarity;
};

// Sum over the lanes, the same in all of them.
DEVICE float sum_lanes(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// Keeps the queries of one KV head; gives the mean cosine with those before.
DEVICE float exchange(const Params& p, u64 first) {
    float similarity = 0.0f;
    for (int g = 0; g < GROUP; g++) {
        float both = 0.0f, before = 0.0f, now = 0.0f;
#pragma unroll
        for (int j = 0; j < kHeadPairs / 32; j++) {
            const u64 at = first + g * kHeadPairs + j * 32 + (threadIdx.x & 31);
            const u32 a = p.kept[at], b = p.q[at];
            p.kept[at] = b;
            both += bf16_low(a) * bf16_low(b) + bf16_high(a) * bf16_high(b);
            before += bf16_low(a) * bf16_low(a) + bf16_high(a) * bf16_high(a);
            now += bf16_low(b) * bf16_low(b) + bf16_high(b) * bf16_high(b);
        }
        similarity += sum_lanes(both) / sqrtf(sum_lanes(before) * sum_lanes(now));
    }
    return similarity / GROUP;
}

// Adds up tiles and corrections; one warp alone.
DEVICE void add_up(const Params& p) {
    const i32 lane = threadIdx.x & 31;
    i32 tiles = 0, corrected = 0;
    for (i32 base = 0; base < p.requests; base += 32) {
        const i32 request = base + lane;
        // Written by other CTAs.
        const i32 blocks = request < p.requests ? __ldcg(p.blocks + request) : 0;
        i32 sum = (blocks + kBlock - 1) / kBlock;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const i32 other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        if (request < p.requests) p.tile_start[request + 1] = tiles + sum;
        tiles += __shfl_sync(~0u, sum, 31);
        corrected += __popc(__ballot_sync(~0u, blocks > 0));
    }
    if (lane != 0) return;
    p.tile_start[0] = 0;
    *p.corrected += (u64)corrected;
    *p.arrived = 0;
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) find_corrections(const __grid_constant__ Params p) {
    __shared__ bool is_last;
    const i32 request = blockIdx.x, warp = threadIdx.x >> 5;
    const i32 position = __ldg(p.position + request);
    bool due = false;
    if (position >= 0)
        for (i32 head = warp; head < p.kv_heads; head += kWarps) {
            const float similarity = exchange(p, ((u64)request * p.kv_heads + head) * GROUP * kHeadPairs);
            // NaN, of queries without a direction, is due.
            due |= !(similarity >= p.min_similarity);
        }
    if (p.ranked == nullptr) return;
    due = __syncthreads_or(due);
    if (threadIdx.x == 0) {
        // The block of this step's token is the tail; the one before was placed when it was complete.
        const i32 blocks = due ? position / kBlock : 0;
        p.blocks[request] = blocks;
        p.ranked[request] = blocks > 0 ? blocks * kBlock : -1;
        __threadfence();
        is_last = atomicAdd(p.arrived, 1u) == (u32)p.requests - 1;
    }
    __syncthreads();
    if (!is_last || warp != 0) return;
    __threadfence();
    add_up(p);
}
