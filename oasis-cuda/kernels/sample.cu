// The next token of every row: the largest logit, the lowest token among equals, never NaN or negative infinity; with
// a temperature, the largest of logit / temperature + Gumbel noise, which draws from the softmax in one pass.
//
// Noise is a hash of (seed, position, token): it depends on nothing but the request.
#include "prelude.cuh"

struct Params {
    const float* logits;       // [rows][vocab]
    const float* temperature;  // [rows], 0 is greedy
    const u64* seed;           // [rows]
    const i32* position;       // [rows]
    u64* best;                 // [rows], zero between launches
    u32* arrived;              // [rows], zero between launches
    i32* token;                // [rows], -1 where no logit is a number above negative infinity
    i32 vocab;
};

// A finaliser of 64-bit hashes (SplitMix64).
DEVICE u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
DEVICE float gumbel(u64 seed, i32 position, i32 token) {
    constexpr u64 kStep = 0x9e3779b97f4a7c15ull;
    const u64 bits = mix(mix(seed + kStep * (u64)(position + 1)) + kStep * (u64)(token + 1));
    const float uniform = ((float)(u32)(bits >> 41) + 0.5f) * 0x1p-23f;  // in (0, 1)
    return -__logf(-__logf(uniform));
}

extern "C" __global__ void __launch_bounds__(512) sample_tokens(const __grid_constant__ Params p) {
    __shared__ u64 warps[16];
    const i32 row = blockIdx.y, lane = threadIdx.x & 31;
    const float* logits = p.logits + (u64)row * p.vocab;
    const float temperature = __ldg(p.temperature + row), inverse = temperature > 0.0f ? 1.0f / temperature : 1.0f;
    const u64 seed = __ldg(p.seed + row);
    const i32 position = __ldg(p.position + row);
    u64 best = 0;  // order of the value << 32 | ~token
    for (i32 token = blockIdx.x * 512 + threadIdx.x; token < p.vocab; token += gridDim.x * 512) {
        const float logit = __ldg(logits + token);
        if (!(logit > __uint_as_float(0xff800000u))) continue;
        const float value = temperature > 0.0f ? logit * inverse + gumbel(seed, position, token) : logit;
        const u32 bits = __float_as_uint(value == 0.0f ? 0.0f : value);
        const u64 key = (u64)((bits & 0x80000000u) ? ~bits : (bits | 0x80000000u)) << 32 | (u32)~token;
        best = key > best ? key : best;
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(~0u, best, d);
        best = other > best ? other : best;
    }
    if (lane == 0) warps[threadIdx.x >> 5] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < 16; w++) best = warps[w] > best ? warps[w] : best;
    atomicMax(p.best + row, best);
    __threadfence();
    if (atomicAdd(p.arrived + row, 1u) != gridDim.x - 1) return;
    best = atomicExch(p.best + row, 0ull);
    p.arrived[row] = 0;
    p.token[row] = best == 0 ? -1 : (i32)~(u32)best;
}
