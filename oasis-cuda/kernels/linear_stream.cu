// Linear layers of few rows: y[row][o] = sum of x[row][i] w[o][i]. Weights stream once from memory to the tensor cores;
// they are the rows of the products, 64 a warpgroup, and rows of x are the columns.
//
// The CTAs of a cluster share TILE outputs, each with its part of the inner dimension. Their sums are added in the order of
// the CTAs, through shared memory: the same bits from run to run, and for a row whatever rows there are beside it.
//
// -D COLUMNS=8|16|32|64 (rows of x at most) TILE=64|128 (outputs of a cluster) STAGES=n (steps in flight)
#include "cluster.cuh"
#include "overlap.cuh"
#include "tensor.cuh"
#include "wgmma.cuh"
#include "work.cuh"

struct Params {
    TensorMap w;  // bf16 [out][1][inner], in boxes of TILE rows by 64 elements
    TensorMap x;  // bf16 [rows][1][inner], in boxes of COLUMNS rows by 64 elements
    void* y;      // bf16 or f32 [rows][y_stride]; written
    const uint4* bias;  // bf16 [out], or none
    i32 rows, out, inner, y_stride;
    i32 wide;        // 1 where y is f32
    i32 accumulate;  // 1 where y is added to
};

constexpr int kWarpgroups = TILE / 64, kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 32;
constexpr u32 kWeightBytes = TILE * 128, kStageBytes = kWeightBytes + COLUMNS * 128;
constexpr int kPitch = TILE + 4;  // floats from a column of sums to the next: lanes of a warp meet different banks
constexpr int kMostCtas = 8;      // of a cluster
static_assert(COLUMNS * kPitch * 4 <= STAGES * kStageBytes, "the sums fit where the operands were");

// Shared memory, from a multiple of 1024 bytes on.
struct Shared {
    u8 stages[STAGES][kStageBytes];  // weights, then rows of x; at the end the sums, [COLUMNS][kPitch]
    u64 full[STAGES], empty[STAGES];
};

// d += a . b: 64 rows and 16 steps of `a`, as many columns of `b` as two sums a thread are for.
#define COLUMN_PRODUCT(n, list, registers, a_index, b_index)                                                      \
    asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, 1, 0;"                                           \
                 "mov.b64 a, {" a_index ", " UPPER_HALF "}; mov.b64 b, {" b_index ", " UPPER_HALF "};"            \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 " list ", a, b, p, 1, 1, 0, 0; }"       \
                 : registers                                                                                      \
                 : "r"(a), "r"(b))
#define REGISTERS_4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define REGISTERS_16(d) REGISTERS_8(d, 0), REGISTERS_8(d, 8)
DEVICE void multiply_columns(float (&d)[4], u32 a, u32 b) {
    COLUMN_PRODUCT("8", "{%0,%1,%2,%3}", REGISTERS_4(d), "%4", "%5");
}
DEVICE void multiply_columns(float (&d)[8], u32 a, u32 b) {
    COLUMN_PRODUCT("16", "{%0,%1,%2,%3,%4,%5,%6,%7}", REGISTERS_8(d, 0), "%8", "%9");
}
DEVICE void multiply_columns(float (&d)[16], u32 a, u32 b) {
    COLUMN_PRODUCT("32", "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}", REGISTERS_16(d), "%16", "%17");
}
DEVICE void multiply_columns(float (&d)[32], u32 a, u32 b) {
    COLUMN_PRODUCT("64", SUMS_32, REGISTERS_32(d, 0), "%32", "%33");
}

// Copies steps [begin, end) of 64 elements in; one thread.
DEVICE void produce(const Params& p, Shared& shared, i32 tile, i32 begin, i32 end) {
    auto weights_in = [&](i32 step, u32 stage) {
        const u32 full = shared_address(&shared.full[stage]);
        barrier_expect(full, kStageBytes);
        tensor_stream_in(shared_address(shared.stages[stage]), p.w, step * 64, 0, tile * TILE, full);
    };
    auto rows_in = [&](i32 step, u32 stage) {
        tensor_in(shared_address(shared.stages[stage]) + kWeightBytes, p.x, step * 64, 0, 0,
                  shared_address(&shared.full[stage]));
    };
    // Weights are nobody's work: they are under way while the kernel before still makes x.
    const i32 first = min(end - begin, STAGES);
    for (i32 i = 0; i < first; i++) weights_in(begin + i, i);
    wait_for_last();
    for (i32 i = 0; i < first; i++) rows_in(begin + i, i);
    u32 stage = 0, parity = 0;
    for (i32 step = begin + STAGES; step < end; step++) {
        barrier_wait(shared_address(&shared.empty[stage]), parity);
        weights_in(step, stage);
        rows_in(step, stage);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// Multiplies them; a warpgroup's sums go to shared memory.
DEVICE void consume(Shared& shared, i32 steps) {
    const u32 warpgroup = threadIdx.x / 128, lane = threadIdx.x & 31;
    float d[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) d[i] = 0.0f;
    u32 stage = 0, parity = 0, before = 0;
    for (i32 step = 0; step < steps; step++) {
        barrier_wait(shared_address(&shared.full[stage]), parity);
        const u32 at = shared_address(shared.stages[stage]);
        const u32 a = operand(at + warpgroup * 64 * 128), b = operand(at + kWeightBytes);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) multiply_columns(d, operand_at(a, k * 32), operand_at(b, k * 32));
        products_commit();
        products_wait<1>();
        if (step > 0 && lane == 0) barrier_arrive(shared_address(&shared.empty[before]));
        before = stage;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    products_wait<0>();
    hold(d);
    // Nobody reads operands any more.
    named_wait<kConsumers>(1);
    float* sums = reinterpret_cast<float*>(shared.stages);
    const u32 row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[(j * 8 + column + i % 2) * kPitch + row + i / 2 * 8] = d[j * 4 + i];
}

// Adds up what the CTAs of the cluster have, 8 outputs of a row a thread; each CTA does its part of them.
DEVICE void reduce(const Params& p, Shared& shared, i32 tile, u32 rank, u32 split) {
    const Parts parts(p.rows * (TILE / 8), split);
    const u32 sums = shared_address(shared.stages);
    for (i32 at = parts.begin(rank) + threadIdx.x; at < parts.begin(rank + 1); at += kConsumers) {
        const i32 row = at / (TILE / 8), o = at % (TILE / 8) * 8, output = tile * TILE + o;
        if (output >= p.out) continue;
        float4 found[kMostCtas][2];
#pragma unroll
        for (int cta = 0; cta < kMostCtas; cta++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (cta < split)
                    found[cta][half] = cluster_load(cluster_address(sums, cta) + (row * kPitch + o + half * 4) * 4);
        float total[8] = {};
#pragma unroll
        for (int cta = 0; cta < kMostCtas; cta++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (cta < split) {
                    const float4 x = found[cta][half];
                    total[half * 4] += x.x;
                    total[half * 4 + 1] += x.y;
                    total[half * 4 + 2] += x.z;
                    total[half * 4 + 3] += x.w;
                }
        auto add_bf16 = [&](uint4 x) {
            const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                total[2 * i] += bf16_low(words[i]);
                total[2 * i + 1] += bf16_high(words[i]);
            }
        };
        if (p.bias) add_bf16(__ldg(p.bias + output / 8));
        const u64 place = (u64)row * p.y_stride + output;
        if (p.wide) {
            float4* y = reinterpret_cast<float4*>(static_cast<float*>(p.y) + place);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float4 x = {total[half * 4], total[half * 4 + 1], total[half * 4 + 2], total[half * 4 + 3]};
                if (p.accumulate) {
                    const float4 old = y[half];
                    x = {x.x + old.x, x.y + old.y, x.z + old.z, x.w + old.w};
                }
                y[half] = x;
            }
        } else {
            uint4* y = reinterpret_cast<uint4*>(static_cast<u16*>(p.y) + place);
            if (p.accumulate) add_bf16(*y);
            *y = {bf16_pair(total[0], total[1]), bf16_pair(total[2], total[3]), bf16_pair(total[4], total[5]),
                  bf16_pair(total[6], total[7])};
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, TILE == 64 ? 3 : 2)
    stream_linear(const __grid_constant__ Params p) {
    extern __shared__ u8 unaligned[];
    next_may_begin();
    Shared& shared = *reinterpret_cast<Shared*>(((u64)unaligned + 1023) & ~1023ull);
    const u32 rank = cluster_rank(), split = cluster_size();
    const i32 tile = blockIdx.x / split;
    if (threadIdx.x == kConsumers) {
        tensor_prefetch(p.w);
        tensor_prefetch(p.x);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), kConsumers / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const Parts parts((p.inner + 63) / 64, split);
    const i32 begin = parts.begin(rank), end = parts.begin(rank + 1);
    if (threadIdx.x == kConsumers) produce(p, shared, tile, begin, end);
    if (threadIdx.x < kConsumers) consume(shared, end - begin);
    __syncwarp();
    wait_for_last();
    if (split > 1) cluster_sync();
    else __syncthreads();
    if (threadIdx.x < kConsumers) reduce(p, shared, tile, rank, split);
    // A CTA's shared memory is there until all have read it.
    __syncwarp();
    if (split > 1) cluster_sync();
}
