// What every layer of a step works on, from the tokens and positions that the host gives: one CTA, once a step.
//
// -D QUERIES=1|2
#include "prelude.cuh"

constexpr i32 kBlock = 16;
constexpr int kThreads = 1024;  // most requests of a batch

// A request of the batch, written by the host in mapped memory.
struct Input {
    i32 token, position;  // position -1 is padding
};

struct Params {
    const Input* inputs;      // [requests]
    i32* token;               // [requests]
    i32* position;            // [requests] position of the first query token; -1 for padding
    i32* ranked;              // [requests] newest token of the blocks to be ranked
    i32* entry_start;         // [requests + 1] entries of a KV head, tail included, before each request
    i32* tile_start;          // [requests + 1] summary tiles of a KV head before each request
    i32* blocks;              // [requests] complete blocks to be ranked
    i32* draft_position;      // [requests] position of the draft head's row; -1 for padding
    i32* draft_entry_start;   // [requests + 1] entries of a KV head of the draft head before each request
    u32* step;                // [1] counted up
    i32 requests;
    i32 slots;                // entries of a KV head that stay on the device; those of the longest context when all do
    i32 draft_blocks;         // newest blocks of its own KV that the draft head attends to
    i32 lag;                  // 0: blocks that this step completes are ranked; 1: only those complete before it
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
    const i32 i = threadIdx.x;
    const Input input = i < p.requests ? p.inputs[i] : Input{0, -1};
    const i32 position = input.position, ranked = position < 0 ? -1 : position - p.lag;
    const i32 complete = (ranked + 1) / kBlock;
    // The block of this step's token is the tail, complete or not; the draft token may stand in the next one.
    const i32 tail = position < 0 ? 0 : (position + QUERIES - 1) / kBlock - position / kBlock + 1;
    const i32 full = position < 0 ? 0 : min(position / kBlock, p.slots);
    // The head's row of this token stands at the position before, whose hidden states it reads.
    const i32 draft = position - 1, draft_entries = draft < 0 ? 0 : min(draft / kBlock + 1, p.draft_blocks);
    const i32 entries = running_sum(full + tail, sums), tiles = running_sum((complete + kBlock - 1) / kBlock, sums);
    const i32 drafts = running_sum(draft_entries, sums);
    if (i < p.requests) {
        p.token[i] = input.token;
        p.position[i] = position;
        p.ranked[i] = ranked;
        p.entry_start[i + 1] = entries;
        p.tile_start[i + 1] = tiles;
        p.blocks[i] = complete;
        p.draft_position[i] = max(draft, -1);
        p.draft_entry_start[i + 1] = drafts;
    }
    if (i == 0) {
        p.entry_start[0] = p.tile_start[0] = p.draft_entry_start[0] = 0;
        ++*p.step;
    }
}
