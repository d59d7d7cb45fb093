// Rows of the embedding, one CTA a token.
#include "prelude.cuh"

struct Params {
    const uint4* table;  // bf16 [vocab][hidden]
    const i32* tokens;   // [rows]
    uint4* out;          // bf16 [rows][hidden]
    i32 hidden;          // a multiple of 8
};

extern "C" __global__ void __launch_bounds__(256) embed_tokens(const __grid_constant__ Params p) {
    const u64 groups = p.hidden / 8;
    const uint4* source = p.table + (u64)__ldg(p.tokens + blockIdx.x) * groups;
    for (i32 i = threadIdx.x; i < groups; i += 256) p.out[blockIdx.x * groups + i] = __ldg(source + i);
}
