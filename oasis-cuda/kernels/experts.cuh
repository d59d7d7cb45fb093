// Work of a mixture of experts: pairs of a row and an expert that it is routed to, sorted by expert, then by row.
//
// -D EXPERTS=n, a multiple of 32
#pragma once
#include "prelude.cuh"

static_assert(EXPERTS % 32 == 0, "EXPERTS is a multiple of 32");

// Pairs [first, first + count) of `expert`, and which part of its work this is; `expert` is -1 where there is none.
struct Share {
    i32 expert, first, count, part;
};

// The share with number `index`, where an expert of n pairs has parts(n) shares. All lanes of a warp call it together.
template <typename Parts> DEVICE Share share_of(const i32* start, i32 index, Parts parts) {
    constexpr int kHeld = EXPERTS / 32;
    const i32 lane = threadIdx.x & 31;
    i32 first[kHeld], count[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        first[i] = __ldg(start + i * 32 + lane);
        count[i] = __ldg(start + i * 32 + lane + 1) - first[i];
    }
    i32 before = 0;
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        const i32 own = parts(count[i]);
        i32 sum = own;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const i32 other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        const u32 beyond = __ballot_sync(~0u, before + sum > index);
        if (beyond) {
            const i32 holder = __ffs(beyond) - 1;
            return {i * 32 + holder, __shfl_sync(~0u, first[i], holder), __shfl_sync(~0u, count[i], holder),
                    index - __shfl_sync(~0u, before + sum - own, holder)};
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    return {-1, 0, 0, 0};
}

DEVICE float silu(float x) { return x / (1.0f + __expf(-x)); }
