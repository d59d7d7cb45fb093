// From the QKV product of a layer to what attention reads: RMSNorm of query and key heads (Qwen3), rotary embedding,
// keys and values into the tail block (or its page), and the summary of a block that its last token completes. One warp a head.
//
// The draft token (the second of QUERIES) is scratch: it lies in the tail, where the next normal token overwrites it,
// and is never summarised.
//
// -D SUMMARIZER="file" SUMMARY_BYTES=n HEAD_DIM=64|128 QUERIES=1|2
#include "head.cuh"
#include "layout.cuh"
#include "overlap.cuh"
#include SUMMARIZER
#include "summary.cuh"

struct Params {
    const u8* qkv;          // bf16 [requests * QUERIES][q_heads + 2 kv_heads][HEAD_DIM]
    const u8* q_norm;       // bf16 [HEAD_DIM], null without norms
    const u8* k_norm;       // bf16 [HEAD_DIM]
    const float2* rotation; // [positions][HEAD_DIM / 2] cosine and sine
    const i32* position;    // [requests] position of the first query token; -1 for padding
    u8* q;                  // bf16 [requests * QUERIES][q_heads][HEAD_DIM]
    u8* tail;               // [requests][kv_heads][2] entries, block b lies at b % 2; with pages: [pages][kv_heads]
    const i32* pages;       // [requests][page_stride] page of each block; null for tails
    u8* summaries;          // [requests][kv_heads][max_tiles] tiles of 16 blocks; null for none
    i32 requests, q_heads, kv_heads, max_tiles, page_stride;
    float eps;
};

// Key `token` of a tail entry; every lane gets its coordinates.
DEVICE Head load_key(const u8* entry, u32 token) {
    const u32 d = (threadIdx.x & 31) * kPer;
    Head head;
    const u8 *low = entry + key_offset(token, d), *high = entry + key_offset(token, kHalf + d);
    if constexpr (kPer == 2) {
        const u32 a = *reinterpret_cast<const u32*>(low), b = *reinterpret_cast<const u32*>(high);
        head.low[0] = bf16_low(a);
        head.low[1] = bf16_high(a);
        head.high[0] = bf16_low(b);
        head.high[1] = bf16_high(b);
    } else {
        head.low[0] = bf16_float(*reinterpret_cast<const u16*>(low));
        head.high[0] = bf16_float(*reinterpret_cast<const u16*>(high));
    }
    return head;
}

// Summary of block `block`, whose last key is `last` and whose others are in its tail entry.
DEVICE void summarise(const Params& p, i32 pair, i32 block, const u8* entry, const Head& last) {
    Head rows[kRows], keys[kBlock];
#pragma unroll
    for (int token = 0; token + 1 < kBlock; token++) keys[token] = load_key(entry, token);
    keys[kBlock - 1] = last;
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        float low[kBlock], high[kBlock], low_rows[kRows], high_rows[kRows];
#pragma unroll
        for (int token = 0; token < kBlock; token++) {
            low[token] = keys[token].low[i];
            high[token] = keys[token].high[i];
        }
        summarise_coordinate(low, low_rows);
        summarise_coordinate(high, high_rows);
#pragma unroll
        for (int part = 0; part < kRows; part++) {
            rows[part].low[i] = low_rows[part];
            rows[part].high[i] = high_rows[part];
        }
    }
    u8* const tile = p.summaries + ((u64)pair * p.max_tiles + block / kBlock) * kTileBytes;
#pragma unroll
    for (int part = 0; part < kRows; part++) store_row(tile, block % kBlock, part, rows[part]);
    store_side(tile, block % kBlock, rows, [&](int token) { return keys[token]; });
}

extern "C" __global__ void __launch_bounds__(128) append_tokens(const __grid_constant__ Params p) {
    next_may_begin();
    wait_for_last();
    const i32 lane = threadIdx.x & 31, heads = p.q_heads + 2 * p.kv_heads;
    const i32 index = blockIdx.x * 4 + (threadIdx.x >> 5);
    if (index >= p.requests * QUERIES * heads) return;
    const i32 row = index / heads, head = index % heads, request = row / QUERIES, token = row % QUERIES;
    const i32 first = p.position[request], position = first + token;
    if (first < 0) return;

    Head x = Head::load(p.qkv + (u64)index * HEAD_DIM * 2);
    const bool is_value = head >= p.q_heads + p.kv_heads, is_query = head < p.q_heads;
    if (!is_value) {
        if (p.q_norm) x.normalise(is_query ? p.q_norm : p.k_norm, p.eps);
        x.rotate(p.rotation + (u64)position * kHalf);
    }
    const u32 d = lane * kPer;
    if (is_query) {
        u8* const out = p.q + ((u64)row * p.q_heads + head) * HEAD_DIM * 2;
        x.store(out + d * 2, out + (kHalf + d) * 2);
        return;
    }
    const i32 kv_head = head - p.q_heads - (is_value ? p.kv_heads : 0), pair = request * p.kv_heads + kv_head;
    const i32 block = position / kBlock;
    const u64 place = p.pages ? (u64)p.pages[(u64)request * p.page_stride + block] * p.kv_heads + kv_head
                              : (u64)pair * 2 + (block & 1);
    u8* const entry = p.tail + place * kEntryBytes;
    u8* const half = entry + (is_value ? kHalfEntryBytes : 0);
    x.store(half + key_offset(position % kBlock, d), half + key_offset(position % kBlock, kHalf + d));
    if (!is_value && token == 0 && position % kBlock == kBlock - 1 && p.summaries) {
        x.round_to_bf16();
        summarise(p, pair, block, entry, x);
    }
}
