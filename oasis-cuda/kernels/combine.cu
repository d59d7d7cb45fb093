// Adds up what the experts of a row gave, weighted, in the order of their numbers, onto the row of `base` where there is
// one; one CTA a row.
//
// -D TOP=n  experts of a row  -D NARROW=0|1  what they gave is bf16, not f32
#include "prelude.cuh"

struct Params {
    const void* parts;    // bf16 or f32 [pairs][hidden]
    const i32* pair_at;   // [rows][TOP], -1 for none
    const float* weight;  // [rows][TOP]
    const uint2* base;    // bf16 [rows][hidden], may be `out`; null: nothing
    uint2* out;           // bf16 [rows][hidden], written
    i32 hidden;           // a multiple of 4
};

extern "C" __global__ void __launch_bounds__(256) combine_experts(const __grid_constant__ Params p) {
    const i32 row = blockIdx.x, groups = p.hidden / 4;
    i32 at[TOP];
    float weight[TOP];
#pragma unroll
    for (int t = 0; t < TOP; t++) {
        at[t] = __ldg(p.pair_at + row * TOP + t);
        weight[t] = __ldg(p.weight + row * TOP + t);
    }
    for (i32 i = threadIdx.x; i < groups; i += 256) {
        float4 part[TOP];
#pragma unroll
        for (int t = 0; t < TOP; t++) {
            part[t] = {};
            if (at[t] < 0) continue;
            const u64 from = (u64)at[t] * groups + i;
            if (NARROW) {
                const uint2 bits = __ldg((const uint2*)p.parts + from);
                part[t] = {bf16_low(bits.x), bf16_high(bits.x), bf16_low(bits.y), bf16_high(bits.y)};
            } else {
                part[t] = __ldg((const float4*)p.parts + from);
            }
        }
        float4 sum = {};
#pragma unroll
        for (int t = 0; t < TOP; t++) {
            sum.x += weight[t] * part[t].x;
            sum.y += weight[t] * part[t].y;
            sum.z += weight[t] * part[t].z;
            sum.w += weight[t] * part[t].w;
        }
        const u64 to = (u64)row * groups + i;
        if (p.base) {
            const uint2 bits = p.base[to];
            sum.x += bf16_low(bits.x), sum.y += bf16_high(bits.x);
            sum.z += bf16_low(bits.y), sum.w += bf16_high(bits.y);
        }
        p.out[to] = {bf16_pair(sum.x, sum.y), bf16_pair(sum.z, sum.w)};
    }
}
