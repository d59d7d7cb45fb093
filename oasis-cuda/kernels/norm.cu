// Residual add and RMSNorm of rows, one CTA a row: residual += x, out = norm(residual).
//
// -D ITEMS=n: a thread holds ITEMS groups of 8 coordinates, so hidden <= 8 * ITEMS * threads, a multiple of 8
#include "overlap.cuh"

struct Params {
    uint4* residual;      // bf16 [rows][hidden], updated where there is `x`
    const uint4* x;       // bf16 [rows][hidden], null: nothing to add
    const uint4* weight;  // bf16 [hidden]
    uint4* out;           // bf16 [rows][out_stride]
    i32 hidden, out_stride;
    float eps;
};

DEVICE void unpack(uint4 bits, float (&x)[8]) {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = bf16_low(words[i]);
        x[2 * i + 1] = bf16_high(words[i]);
    }
}
DEVICE uint4 pack(const float (&x)[8]) {
    return {bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7])};
}

extern "C" __global__ void __launch_bounds__(1024) add_rms_norm(const __grid_constant__ Params p) {
    __shared__ float sums[32];
    next_may_begin();
    wait_for_last();
    const int t = threadIdx.x, groups = p.hidden / 8, threads = blockDim.x;
    const u64 base = (u64)blockIdx.x * groups, out = (u64)blockIdx.x * (p.out_stride / 8);
    float x[ITEMS][8], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < ITEMS; j++) {
        const int i = j * threads + t;
        if (i >= groups) break;
        unpack(p.residual[base + i], x[j]);
        if (p.x) {
            float added[8];
            unpack(p.x[base + i], added);
#pragma unroll
            for (int k = 0; k < 8; k++) x[j][k] += added[k];
            const uint4 rounded = pack(x[j]);
            p.residual[base + i] = rounded;
            unpack(rounded, x[j]);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) sum += x[j][k] * x[j][k];
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if ((t & 31) == 0) sums[t >> 5] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < threads / 32; w++) sum += sums[w];
    const float scale = rsqrtf(sum / p.hidden + p.eps);
#pragma unroll
    for (int j = 0; j < ITEMS; j++) {
        const int i = j * threads + t;
        if (i >= groups) break;
        float weight[8];
        unpack(__ldg(p.weight + i), weight);
#pragma unroll
        for (int k = 0; k < 8; k++) x[j][k] *= scale * weight[k];
        p.out[out + i] = pack(x[j]);
    }
}
