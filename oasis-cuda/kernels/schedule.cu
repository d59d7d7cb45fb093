// What every layer of a step works on, from the positions alone: one CTA, once a step.
//
// -D QUERIES=1|2
#include "prelude.cuh"

constexpr i32 kBlock = 16;
constexpr int kThreads = 1024;  // most requests of a batch

struct Params {
    const i32* position;  // [requests] position of the first query token; -1 for padding
    i32* entry_start;     // [requests + 1] entries of a KV head, tail included, before each request
    i32* tile_start;      // [requests + 1] summary tiles of a KV head before each request
    i32* blocks;          // [requests] complete blocks, the one that this step's token completes included
    u32* step;            // [1] counted up
    i32 requests;
    i32 slots;            // entries of a KV head that stay on the device; those of the longest context when all do
};

// Sum over the threads up to and including this one.
DEVICE i32 running_sum(i32 value, i32 (&sums)[kThreads / 32]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const i32 other = __shfl_up_sync(~0u, value, d);
        if (lane >= d) value += other;
    }
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    for (int w = 0; w < warp; w++) value += sums[w];
    __syncthreads();
    return value;
}

extern "C" __global__ void __launch_bounds__(kThreads) schedule_step(const __grid_constant__ Params p) {
    __shared__ i32 sums[kThreads / 32];
    const i32 i = threadIdx.x, position = i < p.requests ? p.position[i] : -1;
    const i32 complete = position < 0 ? 0 : (position + 1) / kBlock;
    // The block of this step's token is the tail, complete or not; the draft token may stand in the next one.
    const i32 tail = position < 0 ? 0 : (position + QUERIES - 1) / kBlock - position / kBlock + 1;
    const i32 full = position < 0 ? 0 : min(position / kBlock, p.slots);
    const i32 entries = running_sum(full + tail, sums), tiles = running_sum((complete + kBlock - 1) / kBlock, sums);
    if (i < p.requests) {
        p.entry_start[i + 1] = entries;
        p.tile_start[i + 1] = tiles;
        p.blocks[i] = complete;
    }
    if (i == 0) {
        p.entry_start[0] = p.tile_start[0] = 0;
        ++*p.step;
    }
}
