// Linear layers of experts for many rows: tiles of 128 pairs and 256 rows of weights by warpgroup products, rows gathered
// on the way to shared memory. Each CTA takes every n-th tile, and copies for the next one while it ends the last.
//
// -D EXPERTS=n  -D OUT=n  outputs of a pair, a multiple of 8  -D INNER=n, a multiple of 64, at least 128
// -D GATED=0|1  gate and up of a gathered row, or the row of each pair as it lies
#include "experts.cuh"

struct Params {
    const uint4* x;        // bf16 [rows][INNER], or [pairs][INNER] where not gated
    const uint4* weights;  // bf16 [EXPERTS][2 OUT][INNER]: gates, then ups; [EXPERTS][OUT][INNER] where not gated
    const i32* start;      // [EXPERTS + 1]: pairs of lower experts
    const i32* pair_row;   // [pairs]: row of a pair
    uint4* out;            // bf16 [pairs][OUT]: silu(gate) * up, or the outputs; written
};

constexpr int kThreads = 256, kStages = 4, kAhead = 2, kPairs = 128, kRows = 256, kGroups = INNER / 8;
constexpr int kColumns = GATED ? 128 : 256, kTiles = (OUT + kColumns - 1) / kColumns, kSteps = INNER / 64;
constexpr u32 kPairBytes = kPairs * 128, kStageBytes = kPairBytes + kRows * 128;
// The copies are never more than one tile ahead.
static_assert(INNER % 64 == 0 && kSteps >= kAhead && OUT % 8 == 0, "INNER is a multiple of 64, OUT of 8");

DEVICE void copy_16(u32 to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Rows of 128 bytes, the inner dimension along them, with the 128-byte swizzle; 8 rows are 1024 bytes.
DEVICE u64 matrix(u32 address) { return (u64)(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

#define SUMS_128 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"
#define SUMS_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define SUMS_32(d, i) SUMS_8(d, i), SUMS_8(d, i + 8), SUMS_8(d, i + 16), SUMS_8(d, i + 24)

// d += a . b: 64 rows of `a`, 256 rows of `b`, 16 steps of the sum.
DEVICE void multiply_group(float (&d)[128], u64 a, u64 b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " SUMS_128 ", %128, %129, p, 1, 1, 0, 0; }"
                 : SUMS_32(d, 0), SUMS_32(d, 32), SUMS_32(d, 64), SUMS_32(d, 96)
                 : "l"(a), "l"(b));
}

// Pairs [first, first + count) of `expert`, -1 for none, and columns from `column` on.
struct Tile {
    i32 expert, first, count, column;
};

DEVICE Tile tile_of(const i32* start, i32 index) {
    const Share share = share_of(start, index / kTiles, [](i32 count) { return (count + kPairs - 1) / kPairs; });
    const i32 before = share.part * kPairs;
    return {share.expert, share.first + before, min(share.count - before, kPairs), index % kTiles * kColumns};
}

// What one thread copies: 16 bytes of every 32nd row of a stage.
struct Copies {
    const Params& p;
    u32 shared;  // where the thread's part of the first stage lies
    Tile tile;
    i32 index, step;
    u32 stage;
    const uint4 *pairs[kPairs / 32], *weights[kRows / 32];

    DEVICE Copies(const Params& p, u32 stages) : p(p), index(blockIdx.x), stage(0) {
        const i32 row = threadIdx.x / 8, column = threadIdx.x % 8;
        shared = stages + row * 128 + ((column ^ (row & 7)) << 4);
        enter();
    }
    DEVICE void enter() {
        const i32 row = threadIdx.x / 8, column = threadIdx.x % 8;
        step = 0;
        tile = tile_of(p.start, index);
        if (tile.expert < 0) return;
#pragma unroll
        for (int i = 0; i < kPairs / 32; i++) {
            const i32 pair = tile.first + min(row + 32 * i, tile.count - 1);
            pairs[i] = p.x + (u64)(GATED ? __ldg(p.pair_row + pair) : pair) * kGroups + column;
        }
        const u64 matrix = (u64)tile.expert * (GATED ? 2 * OUT : OUT);
#pragma unroll
        for (int i = 0; i < kRows / 32; i++) {
            // Rows of a gated tile are 128 gates and their ups.
            const i32 half = GATED ? i / (kRows / 64) : 0, output = tile.column + row + 32 * i - half * 128;
            weights[i] = p.weights + (matrix + half * OUT + min(output, OUT - 1)) * kGroups + column;
        }
    }
    // Starts the copies of the next step, of the next tile after the last.
    DEVICE void start() {
        if (step == kSteps) {
            index += gridDim.x;
            enter();
        }
        if (tile.expert >= 0) {
            const u32 to = shared + stage * kStageBytes;
#pragma unroll
            for (int i = 0; i < kPairs / 32; i++) copy_16(to + i * 32 * 128, pairs[i] + step * 8);
#pragma unroll
            for (int i = 0; i < kRows / 32; i++) copy_16(to + kPairBytes + i * 32 * 128, weights[i] + step * 8);
            step++;
        }
        copies_commit();
        stage = (stage + 1) % kStages;
    }
};

// Of the four lanes of a row, lane q gives word q of x[i] to lane i.
DEVICE void transpose(u32 (&x)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
        if (odd) x[i] = other;
        else x[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 other = __shfl_xor_sync(~0u, high ? x[i] : x[i + 2], 2);
        if (high) x[i] = other;
        else x[i + 2] = other;
    }
}

// Of a thread's sums, 4 j to 4 j + 3 are columns 8 j + 2 (lane % 4) and one more, of row lane / 4 and of 8 rows below.
DEVICE void store(const Params& p, const Tile& tile, const float (&d)[128]) {
    const i32 t = threadIdx.x, lane = t & 31, upper = t / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const i32 pair = upper + half * 8;
        uint4* out = p.out + (u64)(tile.first + pair) * (OUT / 8);
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 4) {
            u32 words[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int i = (j + k) * 4 + half * 2;
                float low = d[i], high = d[i + 1];
                if (GATED) {
                    low = silu(low) * d[(i + 64) % 128];
                    high = silu(high) * d[(i + 65) % 128];
                }
                words[k] = bf16_pair(low, high);
            }
            transpose(words);
            const i32 output = tile.column + (j + lane % 4) * 8;
            if (pair < tile.count && output < OUT) out[output / 8] = {words[0], words[1], words[2], words[3]};
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) multiply_experts(const __grid_constant__ Params p) {
    extern __shared__ u8 unaligned[];
    const u32 stages = ((u32)__cvta_generic_to_shared(unaligned) + 1023) & ~1023u;
    Copies copies(p, stages);
#pragma unroll
    for (int s = 0; s < kAhead; s++) copies.start();
    u32 stage = 0;
    for (Tile tile = copies.tile; tile.expert >= 0; tile = copies.tile) {
        float d[128];
#pragma unroll
        for (int i = 0; i < 128; i++) d[i] = 0.0f;
#pragma unroll 1
        for (i32 step = 0; step < kSteps; step++) {
            copies_wait<kAhead - 1>();
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            // Everybody's copies are there, and the products of two steps ago are done with their stage.
            __syncthreads();
            const u32 at = stages + stage * kStageBytes;
            const u64 a = matrix(at + threadIdx.x / 128 * 64 * 128), b = matrix(at + kPairBytes);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < 4; k++) multiply_group(d, a + 2 * k, b + 2 * k);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            copies.start();
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            stage = (stage + 1) % kStages;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
        store(p, tile, d);
    }
}
