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

constexpr int kRows = Summarizer::kRows;
constexpr bool kPacked = kHasCodes<Summarizer>;
constexpr u32 kNumberBytes = kPacked ? 1 : 2;
// A tile: the rows of 16 blocks, then, where they are packed, the scales of those rows.
constexpr u32 kRowsBytes = kRows * HEAD_DIM * kNumberBytes;
constexpr u32 kTileBytes = kBlock * (kRowsBytes + (kPacked ? kRows * 2 : 0));

static_assert(kTileBytes == kBlock * SUMMARY_BYTES, "kRows is the summarizer's rows_per_block, its form device_bytes");
static_assert(kRowsBytes % 128 == 0, "rows of a block: a multiple of 128 bytes, which is eight chunks");
static_assert(!kPacked || kRows <= 2, "packed: at most two rows");

// Byte of coordinate `d` of summary row `part` of block `row` of a tile.
DEVICE u32 summary_offset(u32 row, u32 part, u32 d) {
    const u32 byte = (part * HEAD_DIM + d) * kNumberBytes;
    return row * kRowsBytes + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15);
}

// Byte of the scale of that row, in bf16.
DEVICE u32 scale_offset(u32 row, u32 part) { return kBlock * kRowsBytes + (row * kRows + part) * 2; }

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
