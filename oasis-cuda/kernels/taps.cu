// Keeps the hidden states that the draft head reads: the residual row of every request's own token, one CTA a request.
//
// -D QUERIES=1|2
#include "prelude.cuh"

struct Params {
    const uint4* residual;  // bf16 [requests * QUERIES][hidden]
    const i32* position;    // [requests]; -1 for padding, whose states are left alone
    uint4* taps;            // bf16 [requests][3][hidden], at the tap to be written
    i32 hidden;             // a multiple of 8
};

extern "C" __global__ void __launch_bounds__(256) keep_taps(const __grid_constant__ Params p) {
    if (__ldg(p.position + blockIdx.x) < 0) return;
    const u64 groups = p.hidden / 8;
    for (i32 i = threadIdx.x; i < groups; i += 256)
        p.taps[blockIdx.x * 3 * groups + i] = p.residual[blockIdx.x * QUERIES * groups + i];
}
