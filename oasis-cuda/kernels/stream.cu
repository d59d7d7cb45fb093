// Reads memory as fast as it goes: the ceiling that kernels are measured against.
#include "prelude.cuh"

struct Params {
    const uint4* data;  // [count]
    u64 count;
    u32* sum;  // [1], so that the reads are needed
};

extern "C" __global__ void __launch_bounds__(512) read_stream(const __grid_constant__ Params p) {
    const u64 threads = (u64)gridDim.x * 512;
    u32 sum = 0;
    u64 i = (u64)blockIdx.x * 512 + threadIdx.x;
    for (; i + 7 * threads < p.count; i += 8 * threads) {
        uint4 x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = __ldcs(p.data + i + j * threads);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
    }
    for (; i < p.count; i += threads) sum += __ldcs(p.data + i).x;
    if (sum == 0x12345678u) *p.sum = sum;
}
