// Logits of a row, and the order of its tokens: by logit, the lower token first among equals.
#pragma once
#include "prelude.cuh"

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }

// Grows with the logit, minus zero before zero.
DEVICE u32 order_of(float logit) {
    const u32 bits = __float_as_uint(logit);
    return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}
DEVICE float logit_of(u32 order) { return __uint_as_float((order & 0x80000000u) ? order & 0x7fffffffu : ~order); }

// Grows towards the front of the order of tokens.
DEVICE u64 place_of(u32 order, i32 token) { return (u64)order << 32 | (u32)~token; }
DEVICE i32 token_at(u64 place) { return (i32)~(u32)place; }

// Calls f(logit, token) for the part of a row that belongs to thread `thread` of `threads`, in rising order of tokens,
// with up to kLoads vectors under way.
template <int kLoads, typename F>
DEVICE void each_logit(const float* logits, i32 vocab, i32 thread, i32 threads, F f) {
    // Rows need not begin at a multiple of 16 bytes.
    const i32 head = min((i32)((16 - ((u64)logits & 15)) & 15) / 4, vocab), groups = (vocab - head) / 4;
    if (thread < head) f(__ldg(logits + thread), thread);
    const float4* body = (const float4*)(logits + head);
    for (i32 group = thread; group < groups; group += kLoads * threads) {
        float4 x[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; i++)
            if (group + i * threads < groups) x[i] = __ldg(body + group + i * threads);
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const i32 token = head + (group + i * threads) * 4;
            if (group + i * threads >= groups) break;
            f(x[i].x, token);
            f(x[i].y, token + 1);
            f(x[i].z, token + 2);
            f(x[i].w, token + 3);
        }
    }
    const i32 tail = head + groups * 4 + thread;
    if (tail < vocab) f(__ldg(logits + tail), tail);
}
