// The next token of every row: the largest logit, the lowest token among equals, never NaN or negative infinity; with
// a temperature, the largest of logit / temperature + Gumbel noise, which draws from the softmax in one pass.
//
// Noise is a hash of (seed, position, token): it depends on nothing but the request.
#include "hash.cuh"
#include "logits.cuh"

struct Params {
    const float* logits;       // [rows][vocab]
    const float* temperature;  // [rows], 0 is greedy
    const u64* cut;            // [rows], what filter.cu left of the tokens; null: all
    const u64* seed;           // [rows]
    const i32* position;       // [rows]; -1 for padding, whose token is left alone
    u64* best;                 // [rows], zero between launches
    u32* arrived;              // [rows], zero between launches
    i32* token;                // [rows], -1 where no logit is a number above negative infinity
    i32 vocab;
};

constexpr int kThreads = 512, kLoads = 4;

constexpr float kMostNoise = 23.0f;
DEVICE float gumbel(u64 request, i32 token) {
    const u64 bits = mix(request + kHashStep * (u64)(token + 1));
    const float uniform = ((float)(u32)(bits >> 32) + 0.5f) * 0x1p-32f;
    // -log(1 - uniform), by its series where the logarithm of a number near 1 would lose the digits.
    const float series = uniform * (1.0f + uniform * (0.5f + uniform * (1.0f / 3.0f)));
    return -__logf(uniform < 0x1p-6f ? series : -__logf(1.0f - uniform));
}

// The largest so far of a thread, which sees tokens in rising order: the first among equals stays.
struct Largest {
    float value = -infinity();
    i32 token = -1;

    DEVICE void offer(float x, i32 at) {
        if (x > value) value = x, token = at;
    }
    // Zero where there is none; grows with the value, and among equals with the lower token.
    DEVICE u64 key() const {
        return token < 0 ? 0 : place_of(order_of(value == 0.0f ? 0.0f : value), token);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads) sample_tokens(const __grid_constant__ Params p) {
    __shared__ u64 warps[kThreads / 32];
    const i32 row = blockIdx.y, lane = threadIdx.x & 31, position = __ldg(p.position + row);
    if (position < 0) return;
    const i32 thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads;
    const float* logits = p.logits + (u64)row * p.vocab;
    const float temperature = __ldg(p.temperature + row);
    const u64 cut = p.cut ? __ldg(p.cut + row) : 0;
    Largest largest;
    if (!(temperature > 0.0f) || cut == ~0ull) {
        each_logit<kLoads>(logits, p.vocab, thread, threads, [&](float logit, i32 token) {
            largest.offer(logit, token);
        });
    } else {
        const u64 request = mix(__ldg(p.seed + row) + kHashStep * (u64)(position + 1));
        const float inverse = 1.0f / temperature;
        each_logit<kLoads>(logits, p.vocab, thread, threads, [&](float logit, i32 token) {
            // Most tokens cannot win, whatever their noise.
            const float value = logit * inverse;
            if (!(logit > -infinity()) || value + kMostNoise <= largest.value) return;
            if (place_of(order_of(logit), token) < cut) return;
            largest.offer(value + gumbel(request, token), token);
        });
    }
    u64 best = largest.key();
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(~0u, best, d);
        best = other > best ? other : best;
    }
    if (lane == 0) warps[threadIdx.x >> 5] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < kThreads / 32; w++) best = warps[w] > best ? warps[w] : best;
    atomicMax(p.best + row, best);
    __threadfence();
    if (atomicAdd(p.arrived + row, 1u) != gridDim.x - 1) return;
    best = atomicExch(p.best + row, 0ull);
    p.arrived[row] = 0;
    p.token[row] = best == 0 ? -1 : token_at(best);
}
