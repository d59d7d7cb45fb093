// Weights of a model of which only the shape matters: uniform numbers of mean 0, a hash of seed and index.
#include "hash.cuh"

struct Params {
    u32* data;  // bf16 pairs [pairs]
    u64 pairs, seed;
    float width;  // numbers lie between -width and width
    u32 mask;     // bits of a pair that are kept
};

extern "C" __global__ void __launch_bounds__(512) fill_random(const __grid_constant__ Params p) {
    const u64 threads = (u64)gridDim.x * 512;
    for (u64 i = (u64)blockIdx.x * 512 + threadIdx.x; i < p.pairs; i += threads) {
        const u64 bits = mix(p.seed + kHashStep * (i + 1));
        const float low = (float)(int)(u32)bits * 0x1p-31f, high = (float)(int)(u32)(bits >> 32) * 0x1p-31f;
        p.data[i] = bf16_pair(low * p.width, high * p.width) & p.mask;
    }
}
