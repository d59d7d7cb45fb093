// Rows of the embedding, one CTA a row: of a request's token, then of its draft token where there is one.
//
// -D QUERIES=1|2
#include "prelude.cuh"

struct Params {
    const uint4* table;       // bf16 [vocab][hidden]
    const i32* tokens;        // [rows / QUERIES]
    const i32* draft_tokens;  // [rows / QUERIES], ids of the draft vocabulary
    const i32* target_ids;    // [draft vocabulary], null where both vocabularies are one
    uint4* out;               // bf16 [rows][hidden]
    i32 hidden;               // a multiple of 8
};

extern "C" __global__ void __launch_bounds__(256) embed_tokens(const __grid_constant__ Params p) {
    const u64 groups = p.hidden / 8;
    const i32 request = blockIdx.x / QUERIES;
    i32 token = __ldg(p.tokens + request);
    if (QUERIES == 2 && blockIdx.x % 2 == 1) {
        token = __ldg(p.draft_tokens + request);
        if (p.target_ids && token >= 0) token = __ldg(p.target_ids + token);
    }
    // Padding, and logits without a number: any row will do, nobody reads what comes of it.
    const uint4* source = p.table + (u64)max(token, 0) * groups;
    for (i32 i = threadIdx.x; i < groups; i += 256) p.out[blockIdx.x * groups + i] = __ldg(source + i);
}
