// Summaries of blocks as a summarizer's device code makes them, and how they lie in tiles. Included after that code.
//
// -D SUMMARY_BYTES=n: bytes of a block's summary as the host counts them
#pragma once
#include "head.cuh"
#include "optional.cuh"

template <class S, class = void> constexpr bool kHasRows = false;
template <class S> constexpr bool kHasRows<S, typename Exists<decltype(&S::rows)>::type> = true;
template <class S, class = void> constexpr bool kHasCodes = false;
template <class S> constexpr bool kHasCodes<S, typename Exists<decltype(&S::code)>::type> = true;
template <class S, class = void> constexpr bool kHasSide = false;
template <class S> constexpr bool kHasSide<S, typename Exists<decltype(&S::side_end)>::type> = true;

constexpr int kRows = Summarizer::kRows;
constexpr bool kPacked = kHasCodes<Summarizer>, kSided = kHasSide<Summarizer>;
constexpr u32 kNumberBytes = kPacked ? 1 : 2;
// A tile: the rows of 16 blocks, then, where they are packed, the scales of those rows, or the number beside them.
constexpr u32 kRowsBytes = kRows * HEAD_DIM * kNumberBytes;
constexpr u32 kTileBytes = kBlock * (kRowsBytes + (kPacked ? kRows * 2 : kSided ? 4 : 0));

static_assert(kTileBytes == kBlock * SUMMARY_BYTES, "kRows is the summarizer's rows_per_block, its form device_bytes");
static_assert(kRowsBytes % 128 == 0, "rows of a block: a multiple of 128 bytes, which is eight chunks");
static_assert(!kPacked || kRows <= 2, "packed: at most two rows");
static_assert(!(kPacked && kSided), "packed rows have no number beside them");

// Byte of coordinate `d` of summary row `part` of block `row` of a tile.
DEVICE u32 summary_offset(u32 row, u32 part, u32 d) {
    const u32 byte = (part * HEAD_DIM + d) * kNumberBytes;
    return row * kRowsBytes + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15);
}

// Byte of the scale of that row, in bf16.
DEVICE u32 scale_offset(u32 row, u32 part) { return kBlock * kRowsBytes + (row * kRows + part) * 2; }

// Byte of the number beside the rows of block `row` of a tile, a float.
DEVICE u32 side_offset(u32 row) { return kBlock * kRowsBytes + row * 4; }

// One coordinate of a block's summary rows, from that coordinate of its keys.
template <class S = Summarizer> DEVICE void summarise_coordinate(const float (&keys)[kBlock], float (&rows)[kRows]) {
    if constexpr (kHasRows<S>) {
        S::rows(keys, rows);
    } else {
#pragma unroll
        for (int part = 0; part < kRows; part++) {
            float value = S::init(part);
#pragma unroll
            for (int token = 0; token < kBlock; token++) value = S::update(part, value, keys[token]);
            rows[part] = S::finish(part, value, kBlock);
        }
    }
}

// Writes summary row `part` of block `row` of a tile; the lanes of a warp hold its coordinates.
template <class S = Summarizer> DEVICE void store_row(u8* tile, u32 row, int part, const Head& values) {
    const u32 d = (threadIdx.x & 31) * kPer;
    u8 *const low = tile + summary_offset(row, part, d), *const high = tile + summary_offset(row, part, kHalf + d);
    if constexpr (!kHasCodes<S>) {
        values.store(low, high);
    } else {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < kPer; i++)
            largest = max(largest, max(__float_as_uint(fabsf(values.low[i])), __float_as_uint(fabsf(values.high[i]))));
        largest = __reduce_max_sync(~0u, largest);
        // With an infinite coordinate, or one that is NaN, the whole row is NaN.
        const bool finite = largest < 0x7f800000u;
        const float scale = finite ? S::scale(__uint_as_float(largest)) : __uint_as_float(0x7fffffffu);
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            low[i] = finite ? (u8)S::code(part, values.low[i], scale) : 0;
            high[i] = finite ? (u8)S::code(part, values.high[i], scale) : 0;
        }
        if (d == 0) *reinterpret_cast<u16*>(tile + scale_offset(row, part)) = bf16_bits(scale);
    }
}

// Writes the number beside the rows of block `row` of a tile, where there is one, given those rows and, by `key`, the
// block's keys; the lanes of a warp hold their coordinates.
template <class S = Summarizer, class Key> DEVICE void store_side(u8* tile, u32 row, const Head (&rows)[kRows], Key key) {
    if constexpr (kHasSide<S>) {
        Head stored[kRows];
#pragma unroll
        for (int part = 0; part < kRows; part++) {
            stored[part] = rows[part];
            stored[part].round_to_bf16();
        }
        float value = S::side_start();
#pragma unroll
        for (int token = 0; token < kBlock; token++) {
            const Head x = key(token);
            float sums[S::kSums] = {};
            auto add = [&](float coordinate, const float (&at)[kRows]) {
                float terms[S::kSums];
                S::measure(coordinate, at, terms);
#pragma unroll
                for (int i = 0; i < S::kSums; i++) sums[i] += terms[i];
            };
#pragma unroll
            for (int i = 0; i < kPer; i++) {
                float low[kRows], high[kRows];
#pragma unroll
                for (int part = 0; part < kRows; part++) {
                    low[part] = stored[part].low[i];
                    high[part] = stored[part].high[i];
                }
                add(x.low[i], low);
                add(x.high[i], high);
            }
#pragma unroll
            for (int i = 0; i < S::kSums; i++)
#pragma unroll
                for (int d = 16; d > 0; d >>= 1) sums[i] += __shfl_xor_sync(~0u, sums[i], d);
            value = S::side_next(value, sums);
        }
        if ((threadIdx.x & 31) == 0) *reinterpret_cast<float*>(tile + side_offset(row)) = S::side_end(value);
    }
}
