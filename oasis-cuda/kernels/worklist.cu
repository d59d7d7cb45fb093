// Sorts the pairs of a row and an expert by expert, then by row; one CTA an expert, each warp in its part of the pairs.
#include "prelude.cuh"

struct Params {
    const i32* expert;  // [rows][top], -1 for none
    i32* start;         // [experts + 1], written: pairs of lower experts
    i32* pair_row;      // [rows * top], written in front: row of each pair, sorted
    i32* pair_at;       // [rows][top], written: where the pair went, -1 for none
    i32 rows, top;
};

constexpr int kWarps = 32;

extern "C" __global__ void __launch_bounds__(kWarps * 32) sort_pairs(const __grid_constant__ Params p) {
    __shared__ i32 lower_of[kWarps], equal_of[kWarps];
    const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, mine = blockIdx.x, pairs = p.rows * p.top;
    const i32 width = (pairs + kWarps * 32 - 1) / (kWarps * 32) * 32, begin = warp * width;
    const i32 end = min(begin + width, pairs);
    i32 lower = 0, equal = 0;
#pragma unroll 4
    for (i32 i = begin + lane; i < end; i += 32) {
        const i32 expert = __ldg(p.expert + i);
        lower += expert >= 0 && expert < mine;
        equal += expert == mine;
        if (expert < 0 && mine == 0) p.pair_at[i] = -1;
    }
    lower = __reduce_add_sync(~0u, lower);
    equal = __reduce_add_sync(~0u, equal);
    if (lane == 0) lower_of[warp] = lower, equal_of[warp] = equal;
    __syncthreads();
    const i32 start = __reduce_add_sync(~0u, lower_of[lane]), all = __reduce_add_sync(~0u, equal_of[lane]);
    if (threadIdx.x == 0) {
        p.start[mine] = start;
        if (mine == gridDim.x - 1) p.start[mine + 1] = start + all;
    }
    if (equal == 0) return;
    i32 at = start + __reduce_add_sync(~0u, lane < warp ? equal_of[lane] : 0);
#pragma unroll 4
    for (i32 base = begin; base < end; base += 32) {
        const i32 i = base + lane;
        const bool here = i < end && __ldg(p.expert + i) == mine;
        const u32 others = __ballot_sync(~0u, here);
        if (here) {
            const i32 place = at + __popc(others & ((1u << lane) - 1));
            p.pair_row[place] = i / p.top;
            p.pair_at[i] = place;
        }
        at += __popc(others);
    }
}
