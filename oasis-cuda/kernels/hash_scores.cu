// Scores of all complete blocks that are a hash of the seed, the layer, the KV head, the query's bits and the block, by
// exactly the rule of oasis-core. One CTA a (request, KV head).
//
// -D HEAD_DIM=64|128 GROUP=1..16 QUERIES=1|2 QUERY=0|1
#include "hash.cuh"

constexpr int kThreads = 256;

struct Params {
    const u8* q;        // bf16 [requests][QUERIES][kv_heads * GROUP][HEAD_DIM]
    const i32* blocks;  // [requests] complete blocks
    float* scores;      // [requests][kv_heads][stride]
    u64 seed;           // of this layer
    i32 kv_heads, stride;
};

// One step of the generator that `x` is the state of.
DEVICE u64 step(u64 x) { return mix(x + kHashStep); }

extern "C" __global__ void __launch_bounds__(kThreads) hash_scores(const __grid_constant__ Params p) {
    __shared__ u16 query[GROUP * HEAD_DIM];
    __shared__ u64 start;
    const i32 head = blockIdx.x, request = blockIdx.y, t = threadIdx.x;
    const i32 blocks = __ldg(p.blocks + request);
    if (blocks == 0) return;
    const u64 row = ((u64)request * QUERIES + QUERY) * p.kv_heads + head;
    const u16* q = reinterpret_cast<const u16*>(p.q) + row * GROUP * HEAD_DIM;
    for (i32 i = t; i < GROUP * HEAD_DIM; i += kThreads) query[i] = __ldg(q + i);
    __syncthreads();
    if (t == 0) {
        u64 hash = step(p.seed ^ (u64)head);
        for (i32 i = 0; i < GROUP * HEAD_DIM; i++) hash = step(hash ^ (u64)__float_as_uint(bf16_float(query[i])));
        start = hash;
    }
    __syncthreads();
    float* const scores = p.scores + ((u64)request * p.kv_heads + head) * p.stride;
    for (i32 block = t; block < blocks; block += kThreads) scores[block] = (float)(step(start ^ (u64)block) >> 40);
}
