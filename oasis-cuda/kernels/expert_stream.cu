// Linear layers of experts for few rows: each expert's weights stream past its rows once, from memory straight to the
// tensor cores. Weights are the rows of the products, 16 at a time, and tokens their columns, 8 at a time.
//
// A few warps have two tiles of 16 outputs: gates and their ups, which become silu(gate) * up in bf16, or 32 outputs in
// f32. They share the inner dimension, 32 elements in turn, and add their sums in a fixed order.
//
// -D EXPERTS=n  -D OUT=n  outputs of a pair, a multiple of 16, or of 32 where not gated
// -D INNER=n, a multiple of 32  -D GATED=0|1  gate and up of a gathered row, or the row of each pair as it lies
#include "experts.cuh"
#include "mma.cuh"

struct Params {
    const uint4* x;        // bf16 [rows][INNER], or [pairs][INNER] where not gated
    const uint4* weights;  // bf16 [EXPERTS][2 OUT][INNER]: gates, then ups; [EXPERTS][OUT][INNER] where not gated
    const i32* start;      // [EXPERTS + 1]: pairs of lower experts
    const i32* pair_row;   // [pairs]: row of a pair
    void* out;             // bf16 [pairs][OUT], or f32 where not gated; written
};

// Warps that share the inner dimension: enough to fill the card for one token, not so many that their sums take long.
constexpr int kWarps = 4, kSplit = INNER >= 1536 ? 4 : 2, kTeams = kWarps / kSplit;
constexpr int kGroups = INNER / 8;  // groups of 8 elements
constexpr int kTile = GATED ? 16 : 32, kTiles = OUT / kTile, kMatrix = (GATED ? 2 : 1) * OUT;
constexpr int kParts = (kTiles + kTeams - 1) / kTeams;  // CTAs of an expert
constexpr int kChunks = INNER / 32, kSteps = (kChunks + kSplit - 1) / kSplit;
static_assert(INNER % 32 == 0 && OUT % kTile == 0, "INNER is a multiple of 32, OUT of the tile");

// Weights are read once: they need no place in the L1 cache.
DEVICE uint4 load_once(const uint4* from) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(from));
    return x;
}

// Waits for the warps of `team`. A barrier's number is a constant: else a CTA would take all that there are.
template <int kTeam = 0> DEVICE void team_sync(i32 team) {
    if (team == kTeam) asm volatile("bar.sync %0, %1;" ::"n"(kTeam + 1), "n"(kSplit * 32) : "memory");
    else if constexpr (kTeam + 1 < kTeams) team_sync<kTeam + 1>(team);
}

// Two tiles times `kTokens` groups of 8 tokens. A lane loads 16 bytes of a row: the 8 elements stand for two steps of
// the sum whose elements are numbered anew, the same way on both sides. Weights of `kAhead` steps are under way.
template <int kTokens, int kAhead>
DEVICE void multiply_tiles(const Params& p, const Share& share, i32 tile, i32 from, float (*sums)[kTokens * 8][32]) {
    const i32 lane = threadIdx.x & 31, warp = threadIdx.x / 32 % kSplit, g = lane / 4, q = lane % 4;
    const uint4* weights = p.weights + ((u64)share.expert * kMatrix + tile * kTile + g) * kGroups + q;
    constexpr u64 kSecond = (u64)(GATED ? OUT : 16) * kGroups, kBelow = 8 * kGroups;
    const uint4* tokens[kTokens];
#pragma unroll
    for (int j = 0; j < kTokens; j++) {
        const i32 pair = share.first + min(from + j * 8 + g, share.count - 1);
        tokens[j] = p.x + (u64)(GATED ? __ldg(p.pair_row + pair) : pair) * kGroups + q;
    }
    uint4 held[kAhead][4];
    const auto load = [&](int step, uint4 (&w)[4]) {
        const i32 chunk = step * kSplit + warp;
        if (chunk >= kChunks) return;
        w[0] = load_once(weights + chunk * 4);
        w[1] = load_once(weights + chunk * 4 + kBelow);
        w[2] = load_once(weights + chunk * 4 + kSecond);
        w[3] = load_once(weights + chunk * 4 + kSecond + kBelow);
    };
    float d[2 * kTokens][4] = {};
#pragma unroll
    for (int s = 0; s < kAhead; s++) load(s, held[s]);
#pragma unroll kAhead
    for (int step = 0; step < kSteps; step++) {
        uint4(&w)[4] = held[step % kAhead];
        const i32 chunk = step * kSplit + warp;
        if (chunk < kChunks) {
#pragma unroll
            for (int j = 0; j < kTokens; j++) {
                const uint4 x = __ldg(tokens[j] + chunk * 4);
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const uint4 above = w[2 * t], below = w[2 * t + 1];
                    const u32 first[4] = {above.x, below.x, above.y, below.y};
                    const u32 second[4] = {above.z, below.z, above.w, below.w};
                    multiply(d[t * kTokens + j], first, x.x, x.y);
                    multiply(d[t * kTokens + j], second, x.z, x.w);
                }
            }
        }
        load(step + kAhead, w);
    }
#pragma unroll
    for (int i = 0; i < 8 * kTokens; i++) sums[warp][i][lane] = d[i / 4][i % 4];
    team_sync(threadIdx.x / (kSplit * 32));
#pragma unroll
    for (int j = 0; j < kTokens; j++) {
#pragma unroll
        for (int r = warp; r < 4; r += kSplit) {
            float total[2] = {};
#pragma unroll
            for (int w = 0; w < kSplit; w++) {
                total[0] += sums[w][j * 4 + r][lane];
                total[1] += sums[w][(kTokens + j) * 4 + r][lane];
            }
            const i32 token = from + j * 8 + 2 * q + (r & 1), row = tile * kTile + g + (r & 2) * 4;
            if (token >= share.count) continue;
            const u64 at = (u64)(share.first + token) * OUT + row;
            if (GATED) {
                ((u16*)p.out)[at] = bf16_bits(silu(total[0]) * total[1]);
            } else {
                ((float*)p.out)[at] = total[0];
                ((float*)p.out)[at + 16] = total[1];
            }
        }
    }
    team_sync(threadIdx.x / (kSplit * 32));
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, 4) stream_experts(const __grid_constant__ Params p) {
    __shared__ float sums[kTeams][kSplit * 4 * 8 * 32];
    const Share share = share_of(p.start, blockIdx.x / kParts, [](i32 count) { return count > 0 ? 1 : 0; });
    const i32 team = threadIdx.x / (kSplit * 32), tile = blockIdx.x % kParts * kTeams + team;
    if (share.expert < 0 || tile >= kTiles) return;
    if (share.count <= 8) multiply_tiles<1, 4>(p, share, tile, 0, (float(*)[8][32])sums[team]);
    else if (share.count <= 16) multiply_tiles<2, 3>(p, share, tile, 0, (float(*)[16][32])sums[team]);
    else if (share.count <= 24) multiply_tiles<3, 2>(p, share, tile, 0, (float(*)[24][32])sums[team]);
    else
        for (i32 from = 0; from < share.count; from += 32)
            multiply_tiles<4, 1>(p, share, tile, from, (float(*)[32][32])sums[team]);
}
