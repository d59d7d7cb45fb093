// From the QKV product of a prompt to what attention and decoding read: RMSNorm of query and key heads (Qwen3) and rotary
// embedding in place, keys and values as entries, summaries of complete blocks. One CTA a (block, query or KV head).
//
// -D SUMMARIZER="file" SUMMARY_BYTES=n HEAD_DIM=64|128
#include "head.cuh"
#include "layout.cuh"
#include SUMMARIZER
#include "summary.cuh"

constexpr int kWarps = 4;

struct Params {
    u8* qkv;                 // bf16 [tokens][q_heads + 2 kv_heads][HEAD_DIM]; queries and keys are updated
    const u8* q_norm;        // bf16 [HEAD_DIM], null without norms
    const u8* k_norm;        // bf16 [HEAD_DIM]
    const float2* rotation;  // [positions][HEAD_DIM / 2] cosine and sine
    u8* entries;             // [blocks][kv_heads] entries, or [pages][kv_heads] with pages
    const i32* pages;        // [blocks] page of each block; null: block b is number b
    u8* tail;                // [kv_heads][2] entries: the last block, at its number % 2; null where it is not kept apart
    u8* summaries;           // [kv_heads][max_tiles] tiles of 16 blocks; null for none
    i32 tokens;
    i32 first_query;         // first token whose queries are wanted
    i32 q_heads, kv_heads, max_tiles;
    i32 first_block;         // block of the first token; the chunk begins with a block
    i32 last_block;          // block of the prompt's last token
    float eps;
};

// Coordinate `d` of the summary rows of a block whose keys are `keys`.
DEVICE void summarise_at(const float (*keys)[HEAD_DIM], i32 d, float (&rows)[kRows]) {
    float column[kBlock];
#pragma unroll
    for (int token = 0; token < kBlock; token++) column[token] = keys[token][d];
    summarise_coordinate(column, rows);
}

// Summary of a block whose keys are `keys`: one coordinate a thread, or one row a warp where a row is packed as a whole.
DEVICE void summarise(const Params& p, i32 head, i32 block, const float (*keys)[HEAD_DIM]) {
    u8* const tile = p.summaries + ((u64)head * p.max_tiles + block / kBlock) * kTileBytes;
    const i32 warp = threadIdx.x >> 5, d = (threadIdx.x & 31) * kPer;
    float rows[kRows];
    if constexpr (kPacked || kGridded) {
#pragma unroll
        for (int part = 0; part < kRows; part++) {
            if (warp != part) continue;
            Head values;
#pragma unroll
            for (int i = 0; i < kPer; i++) {
                summarise_at(keys, d + i, rows);
                values.low[i] = rows[part];
                summarise_at(keys, kHalf + d + i, rows);
                values.high[i] = rows[part];
            }
            store_row(tile, block % kBlock, part, values);
        }
    } else if (threadIdx.x < HEAD_DIM) {
        summarise_at(keys, threadIdx.x, rows);
#pragma unroll
        for (int part = 0; part < kRows; part++)
            *reinterpret_cast<u16*>(tile + summary_offset(block % kBlock, part, threadIdx.x)) = bf16_bits(rows[part]);
    }
    if (kSided && warp == 0) {
        Head heads[kRows];
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            float low[kRows], high[kRows];
            summarise_at(keys, d + i, low);
            summarise_at(keys, kHalf + d + i, high);
#pragma unroll
            for (int part = 0; part < kRows; part++) {
                heads[part].low[i] = low[part];
                heads[part].high[i] = high[part];
            }
        }
        store_side(tile, block % kBlock, heads, [&](int token) {
            Head key;
#pragma unroll
            for (int i = 0; i < kPer; i++) {
                key.low[i] = keys[token][d + i];
                key.high[i] = keys[token][kHalf + d + i];
            }
            return key;
        });
    }
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) append_prompt(const __grid_constant__ Params p) {
    __shared__ float keys[kBlock][HEAD_DIM];
    const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, d = lane * kPer;
    const i32 block = p.first_block + blockIdx.x, heads = p.q_heads + 2 * p.kv_heads;
    const i32 first = blockIdx.x * kBlock, count = min(kBlock, p.tokens - first);
    const bool is_query = (i32)blockIdx.y < p.q_heads;
    const i32 kv_head = (i32)blockIdx.y - p.q_heads;
    auto row = [&](i32 token, i32 head) { return p.qkv + ((u64)(first + token) * heads + head) * HEAD_DIM * 2; };
    auto turned = [&](i32 token, i32 head) {
        Head x = Head::load(row(token, head));
        if (p.q_norm) x.normalise(is_query ? p.q_norm : p.k_norm, p.eps);
        x.rotate(p.rotation + (u64)(block * kBlock + token) * kHalf);
        u8* const out = row(token, head);
        x.store(out + d * 2, out + (kHalf + d) * 2);
        return x;
    };
    if (is_query) {
        for (i32 token = warp; token < count; token += kWarps)
            if (first + token >= p.first_query) turned(token, blockIdx.y);
        return;
    }

    u8* const entry = p.entries + ((u64)(p.pages ? __ldg(p.pages + block) : block) * p.kv_heads + kv_head) * kEntryBytes;
    u8* const tail =
        p.tail && block == p.last_block ? p.tail + ((u64)kv_head * 2 + (block & 1)) * kEntryBytes : nullptr;
    for (i32 token = warp; token < count; token += kWarps) {
        Head key = turned(token, p.q_heads + kv_head);
        const Head value = Head::load(row(token, p.q_heads + p.kv_heads + kv_head));
        const u32 low = key_offset(token, d), high = key_offset(token, kHalf + d);
        key.store(entry + low, entry + high);
        value.store(entry + kHalfEntryBytes + low, entry + kHalfEntryBytes + high);
        if (tail) {
            key.store(tail + low, tail + high);
            value.store(tail + kHalfEntryBytes + low, tail + kHalfEntryBytes + high);
        }
        key.round_to_bf16();
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            keys[token][d + i] = key.low[i];
            keys[token][kHalf + d + i] = key.high[i];
        }
    }
    if (count < kBlock || !p.summaries) return;
    __syncthreads();
    summarise(p, kv_head, block, keys);
}
