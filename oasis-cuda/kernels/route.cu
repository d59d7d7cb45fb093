// The experts of every row, one warp a row: the largest logits, the lower number among equals, in the order of their
// numbers, with the softmax's weights.
//
// -D EXPERTS=n, a multiple of 32  -D TOP=n, at most 32
#include "logits.cuh"

struct Params {
    const float* logits;  // [rows][EXPERTS]
    const i32* position;  // [rows / queries], below 0 for padding; null: no padding
    i32* expert;          // [rows][TOP], written: rising in a row, -1 in padding
    float* weight;        // [rows][TOP], written
    i32 rows;
    i32 queries;    // rows of a position
    i32 normalize;  // whether the weights of a row sum to 1
};

constexpr int kWarps = 4, kHeld = EXPERTS / 32;
static_assert(EXPERTS % 32 == 0 && TOP <= 32 && TOP <= EXPERTS, "EXPERTS is a multiple of 32, TOP at most 32");

extern "C" __global__ void __launch_bounds__(kWarps * 32) route_rows(const __grid_constant__ Params p) {
    const i32 lane = threadIdx.x & 31, row = blockIdx.x * kWarps + (threadIdx.x >> 5);
    if (row >= p.rows) return;
    const u64 out = (u64)row * TOP + lane;
    if (p.position && __ldg(p.position + row / p.queries) < 0) {
        if (lane < TOP) p.expert[out] = -1, p.weight[out] = 0.0f;
        return;
    }
    float logit[kHeld], largest = -infinity();
    u64 place[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        const i32 expert = i * 32 + lane;
        logit[i] = __ldg(p.logits + (u64)row * EXPERTS + expert);
        largest = fmaxf(largest, logit[i]);
        place[i] = place_of(order_of(logit[i] == 0.0f ? 0.0f : logit[i]), expert);
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; i++) sum += expf(logit[i] - largest);
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    // Lane t keeps the t-th choice.
    u64 mine = 0;
    float chosen = 0.0f;
#pragma unroll 1
    for (int t = 0; t < TOP; t++) {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < kHeld; i++) best = place[i] > best ? place[i] : best;
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) {
            const u64 other = __shfl_xor_sync(~0u, best, d);
            best = other > best ? other : best;
        }
#pragma unroll
        for (int i = 0; i < kHeld; i++)
            if (place[i] == best) place[i] = 0;
        if (lane == t) mine = best;
        chosen += expf(logit_of((u32)(best >> 32)) - largest);
    }
    const i32 expert = token_at(mine);
    i32 rank = 0;
    for (int t = 0; t < TOP; t++) rank += __shfl_sync(~0u, expert, t) < expert;
    if (lane >= TOP) return;
    p.expert[out - lane + rank] = expert;
    p.weight[out - lane + rank] = expf(logit_of((u32)(mine >> 32)) - largest) / (p.normalize ? chosen : sum);
}
