// Prefill attention: the query tokens of one request over its keys so far, causal.
//
// A CTA takes a tile, 64 query tokens a warpgroup of one head. One thread copies in queries, keys and values. The other
// warpgroups each go block by block through the keys, from the last: while the tensor cores multiply queries with the
// keys of a block and the weights of the block before with its values, the threads turn scores into weights. Letting
// the warpgroups take turns at the tensor cores was measured to be slower, as were CTAs that take several tiles.
//
// -D HEAD_DIM=64|128 WARPGROUPS=2|3 (with queries) KEYS=128 (of a block) STAGES=n (blocks in flight)
#include "mma.cuh"
#include "tensor.cuh"
#include "wgmma.cuh"

constexpr int kRows = 64 * WARPGROUPS;
constexpr int kPanels = HEAD_DIM / 64;
constexpr u32 kRowsPanelBytes = 64 * 128, kRowsBytes = kPanels * kRowsPanelBytes;  // a warpgroup's queries
constexpr u32 kKeysPanelBytes = KEYS * 128, kKeysBytes = kPanels * kKeysPanelBytes;
constexpr int kThreads = 128 * (1 + WARPGROUPS);
#define NONE __uint_as_float(0xff800000u)  // minus infinity: the score of a key that is not seen
// A row's weights are relative to a score at most this far (in powers of two) below its maximum so far: far from the
// limits of bf16 and float, and sums are seldom scaled.
constexpr float kSlack = 8.0f;

struct Params {
    TensorMap q;    // bf16 [q_tokens][q_heads][HEAD_DIM], in boxes of 64 tokens by 64 elements
    TensorMap k;    // bf16 [kv_tokens][kv_heads][HEAD_DIM], in boxes of KEYS tokens by 64 elements
    TensorMap v;    // as k
    TensorMap out;  // as q
    i32 q_tokens, kv_tokens;
    i32 group;      // query heads of a KV head
    i32 section;    // query heads that are worked on at a time; a divisor of q_heads
    float scale;    // log2(e) / sqrt(HEAD_DIM)
};

// Shared memory, from a multiple of 1024 bytes on.
struct Shared {
    u8 q[WARPGROUPS][kRowsBytes];  // and the output on its way out
    u8 k[STAGES][kKeysBytes];
    u8 v[STAGES][kKeysBytes];
    u64 q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

template <bool VALUE> struct Constant {
    static constexpr bool kValue = VALUE;
};

// Position in a ring of stages; waiting for `parity` is waiting until the stage was filled.
struct Ring {
    u32 stage = 0, parity = 0;
    DEVICE void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

struct Tile {
    i32 row, position;  // first query token, and where it stands among the keys
    i32 head, blocks;   // query head, blocks of keys
};

// This CTA's tile. They come in the order of their work, most first, section by section: the keys of a section stay in
// the L2 cache.
DEVICE Tile tile_of(const Params& p) {
    const i32 rows = (p.q_tokens + kRows - 1) / kRows;
    const i32 section = (i32)blockIdx.x / (rows * p.section), index = (i32)blockIdx.x % (rows * p.section);
    Tile tile;
    tile.row = (rows - 1 - index / p.section) * kRows;
    tile.position = p.kv_tokens - p.q_tokens + tile.row;
    tile.head = section * p.section + index % p.section;
    tile.blocks = (min(p.kv_tokens, tile.position + kRows) + KEYS - 1) / KEYS;
    return tile;
}

DEVICE void load_block(u32 to, const TensorMap& map, i32 head, i32 token, u32 barrier) {
    barrier_expect(barrier, kKeysBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; panel++)
        tensor_in(to + panel * kKeysPanelBytes, map, panel * 64, head, token, barrier);
}

// Copies in what the consumers ask for, in their order: the last keys first, values one block behind.
DEVICE void produce(const Params& p, Shared& shared, const Tile& tile) {
    Ring k, v;
    const i32 head = tile.head / p.group;
    auto load_keys = [&](i32 block) {
        barrier_wait(shared_address(&shared.k_empty[k.stage]), k.parity ^ 1);
        load_block(shared_address(shared.k[k.stage]), p.k, head, block * KEYS, shared_address(&shared.k_full[k.stage]));
        k.advance();
    };
    auto load_values = [&](i32 block) {
        barrier_wait(shared_address(&shared.v_empty[v.stage]), v.parity ^ 1);
        load_block(shared_address(shared.v[v.stage]), p.v, head, block * KEYS, shared_address(&shared.v_full[v.stage]));
        v.advance();
    };
    const u32 full = shared_address(&shared.q_full);
    barrier_expect(full, WARPGROUPS * kRowsBytes);
#pragma unroll
    for (int part = 0; part < WARPGROUPS; part++)
#pragma unroll
        for (int panel = 0; panel < kPanels; panel++)
            tensor_in(shared_address(shared.q[part]) + panel * kRowsPanelBytes, p.q, panel * 64, tile.head,
                      tile.row + part * 64, full);
    load_keys(tile.blocks - 1);
    for (i32 block = tile.blocks - 2; block >= 0; block--) {
        load_keys(block);
        load_values(block + 1);
    }
    load_values(0);
}

// A warpgroup's 64 rows. A thread has two of them, `lane / 4` of its warp's 16 and 8 below, and 2 of every 8 columns.
struct Consumer {
    float out[HEAD_DIM / 2], scores[KEYS / 2];
    u32 weights[KEYS / 16][4];
    float base[2], sum[2];  // of each row: what weights are relative to, and their sum in this thread

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i] = 0.0f;
        base[0] = base[1] = NONE;
        sum[0] = sum[1] = 0.0f;
    }

    // Starts scores = q . k.
    DEVICE void multiply_keys(u32 q, u32 k) {
        products_begin();
        multiply_group<false>(scores, q, k);
#pragma unroll
        for (int i = 1; i < HEAD_DIM / 16; i++) {
            const u32 column = i % 4 * 32;
            multiply_group<true>(scores, operand_at(q, i / 4 * kRowsPanelBytes + column),
                                 operand_at(k, i / 4 * kKeysPanelBytes + column));
        }
        products_commit();
    }

    // Starts out += weights . v.
    DEVICE void multiply_values(u32 v) {
        products_begin();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) multiply_group(out, weights[i], operand_at(v, i * 16 * 128));
        products_commit();
    }

    // Scores of keys that a row does not see: those beyond `last` for the thread's first row, one more each row below.
    DEVICE void mask(i32 last) {
        last -= (threadIdx.x & 3) * 2;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            if (i / 4 * 8 + (i & 1) > last + (i & 2) * 4) scores[i] = NONE;
    }

    // Scores to weights, in place. Gives whether `out` is to be multiplied by `factor`, the same in a whole warp.
    template <bool MASK> DEVICE bool weigh(float scale, float (&factor)[2]) {
        float best[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            best[h] = fmaxf(scores[2 * h], scores[2 * h + 1]);
#pragma unroll
            for (int i = 4; i < KEYS / 2; i += 4)
                best[h] = fmaxf(best[h], fmaxf(scores[i + 2 * h], scores[i + 2 * h + 1]));
            best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], 1));
            best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], 2)) * scale;
        }
        const bool grown = __any_sync(~0u, best[0] > base[0] + kSlack || best[1] > base[1] + kSlack);
        if (grown) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float next = fmaxf(base[h], best[h]);
                factor[h] = MASK && next == NONE ? 1.0f : exp2_approx(base[h] - next);
                base[h] = next;
                sum[h] *= factor[h];
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // A row that has seen nothing but masked keys weighs nothing.
            const float minus = MASK && base[h] == NONE ? 0.0f : -base[h];
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 4) {
                scores[i + 2 * h] = exp2_approx(fmaf(scores[i + 2 * h], scale, minus));
                scores[i + 2 * h + 1] = exp2_approx(fmaf(scores[i + 2 * h + 1], scale, minus));
                sum[h] += scores[i + 2 * h] + scores[i + 2 * h + 1];
            }
        }
        return grown;
    }

    // The weights as the left operand of the next product.
    DEVICE void pack() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) weights[i / 4][i & 3] = bf16_pair(scores[2 * i], scores[2 * i + 1]);
    }

    DEVICE void multiply_out(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i] *= factor[i >> 1 & 1];
    }

    // The warp's rows of the output to its warpgroup's panels.
    DEVICE void store(u32 panels) {
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            factor[h] = 1.0f / sum[h];
        }
        multiply_out(factor);
        const u32 lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15), chunk = lane >> 4;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            const float* o = out + i * 8;
            const u32 column = (u32)(i % 4 * 2) + chunk;
            store_matrices(panels + i / 4 * kRowsPanelBytes + row * 128 + ((column ^ (row & 7)) << 4),
                           bf16_pair(o[0], o[1]), bf16_pair(o[2], o[3]), bf16_pair(o[4], o[5]), bf16_pair(o[6], o[7]));
        }
    }
};

DEVICE void consume(const Params& p, Shared& shared, const Tile& tile) {
    // Out of a shuffle, so that the compiler knows them to be the same in a whole warp.
    const i32 part = __shfl_sync(~0u, (i32)(threadIdx.x >> 7) - 1, 0), lane = threadIdx.x & 31;
    const i32 warp = threadIdx.x >> 5 & 3;
    const i32 first = tile.position + part * 64;  // position of the warpgroup's first row
    const i32 position = first + warp * 16 + lane / 4;
    const u32 rows = shared_address(shared.q[part]);
    const u32 q = operand(rows);
    Ring k, v;
    Consumer c;
    float factor[2];
    auto multiply_keys = [&] {
        barrier_wait(shared_address(&shared.k_full[k.stage]), k.parity);
        c.multiply_keys(q, operand(shared_address(shared.k[k.stage])));
    };
    auto multiply_values = [&] {
        barrier_wait(shared_address(&shared.v_full[v.stage]), v.parity);
        c.multiply_values(operand_transposed(shared_address(shared.v[v.stage]), kKeysPanelBytes));
    };
    auto release = [&](u64* empty, Ring& ring) {
        if (lane == 0) barrier_arrive(shared_address(empty + ring.stage));
        ring.advance();
    };

    i32 block = tile.blocks - 1;
    c.clear();
    barrier_wait(shared_address(&shared.q_full), 0);
    multiply_keys();
    products_wait<0>();
    hold(c.scores);
    release(shared.k_empty, k);
    c.mask(position - block * KEYS);
    c.weigh<true>(p.scale, factor);
    c.pack();

    auto step = [&](auto masked) {
        constexpr bool kMask = decltype(masked)::kValue;
        multiply_keys();
        multiply_values();
        products_wait<1>();
        hold(c.scores);
        release(shared.k_empty, k);
        if (kMask) c.mask(position - block * KEYS);
        const bool grown = c.weigh<kMask>(p.scale, factor);
        products_wait<0>();
        hold(c.out);
        release(shared.v_empty, v);
        c.pack();
        if (grown) c.multiply_out(factor);
    };
    for (block--; block >= 0 && block * KEYS + KEYS - 1 > first; block--) step(Constant<true>());
    for (; block >= 0; block--) step(Constant<false>());

    multiply_values();
    products_wait<0>();
    hold(c.out);

    // The queries make room for the output once no warp of the group reads them.
    named_wait<128>(1 + part);
    c.store(rows);
    copy_fence();
    named_wait<128>(1 + part);
    if (warp == 0 && lane == 0) {
#pragma unroll
        for (int panel = 0; panel < kPanels; panel++)
            tensor_out(p.out, rows + panel * kRowsPanelBytes, panel * 64, tile.head, tile.row + part * 64);
        copy_out_commit();
        copy_out_wait_read<0>();
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) prefill_attention(const __grid_constant__ Params p) {
    extern __shared__ u8 memory[];
    Shared& shared = *(Shared*)(memory + (-shared_address(memory) & 1023));
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&shared.q_full), 1);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared_address(&shared.k_full[stage]), 1);
            barrier_init(shared_address(&shared.v_full[stage]), 1);
            barrier_init(shared_address(&shared.k_empty[stage]), 4 * WARPGROUPS);
            barrier_init(shared_address(&shared.v_empty[stage]), 4 * WARPGROUPS);
        }
        barrier_init_fence();
        tensor_prefetch(p.q);
        tensor_prefetch(p.k);
        tensor_prefetch(p.v);
        tensor_prefetch(p.out);
    }
    __syncthreads();
    const Tile tile = tile_of(p);
    if (threadIdx.x < 128) {
        registers_shrink<WARPGROUPS == 2 ? 24 : 32>();
        if (threadIdx.x == 0) produce(p, shared, tile);
    } else {
        registers_grow<WARPGROUPS == 2 ? 240 : 160>();
        consume(p, shared, tile);
    }
}
