// Summaries of blocks as a summarizer's device code makes them, and how they lie in tiles. Included after that code.
//
// -D SUMMARY_BYTES=n: bytes of a block's summary as the host counts them
#pragma once
#include "head.cuh"
#include "optional.cuh"

template <class S, class = void> constexpr bool kHasRows = false;
template <class S> constexpr bool kHasRows<S, typename Exists<decltype(&S::rows)>::type> = true;
template <class S, class = void> constexpr bool kHasCodes = false;
template <class S> constexpr bool kHasCodes<S, typename Exists<decltype(&S::scale)>::type> = true;
template <class S, class = void> constexpr bool kHasGrid = false;
template <class S> constexpr bool kHasGrid<S, typename Exists<decltype(&S::grid)>::type> = true;
template <class S, class = void> constexpr bool kHasSide = false;
template <class S> constexpr bool kHasSide<S, typename Exists<decltype(&S::side_end)>::type> = true;

constexpr int kRows = Summarizer::kRows;
constexpr bool kPacked = kHasCodes<Summarizer>, kGridded = kHasGrid<Summarizer>, kSided = kHasSide<Summarizer>;
constexpr u32 kNumberBits = kGridded ? 4 : kPacked ? 8 : 16;
constexpr int kGridWidth = 32, kHeadGrids = HEAD_DIM / kGridWidth;  // coordinates of a grid, grids of a row
// A tile: the rows of 16 blocks, then their scales (8 bits), their grids (4 bits), or the number beside them.
constexpr u32 kRowsBytes = kRows * HEAD_DIM * kNumberBits / 8;
constexpr u32 kRestBytes = kGridded ? kRows * kHeadGrids * 4 : kPacked ? kRows * 2 : kSided ? 4 : 0;
constexpr u32 kTileBytes = kBlock * (kRowsBytes + kRestBytes);

static_assert(kTileBytes == kBlock * SUMMARY_BYTES, "kRows is the summarizer's rows_per_block, its form device_bytes");
static_assert(kRowsBytes % 128 == 0 || kRowsBytes == 64, "rows of a block: a multiple of 128 bytes, or 64");
static_assert(!kPacked || kRows <= 2, "packed: at most two rows");
static_assert(kPacked + kGridded + kSided <= 1, "packed rows have no number beside them, and one form");

// What the chunks of a block's rows are found by: rows of 128 bytes or more take turns by eight, those of 64 by two.
DEVICE u32 turn_of(u32 row) { return kRowsBytes == 64 ? (row >> 1) & 3 : row & 7; }

// Byte of coordinate `d` of summary row `part` of block `row` of a tile.
DEVICE u32 summary_offset(u32 row, u32 part, u32 d) {
    const u32 byte = (part * HEAD_DIM + d) * kNumberBits / 8;
    return row * kRowsBytes + (((byte >> 4) ^ turn_of(row)) << 4) + (byte & 15);
}

// Byte of the scale of that row, in bf16.
DEVICE u32 scale_offset(u32 row, u32 part) { return kBlock * kRowsBytes + (row * kRows + part) * 2; }

// Byte of grid `grid` of that row: offset in the upper half, step in the lower, in bf16.
DEVICE u32 grid_offset(u32 row, u32 part, u32 grid) {
    return kBlock * kRowsBytes + ((row * kRows + part) * kHeadGrids + grid) * 4;
}

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

// Writes the coordinates from `d` on of summary row `part` in 4 bits; lanes of the same grid stand side by side.
template <class S = Summarizer> DEVICE void store_codes(u8* tile, u32 row, int part, u32 d, const float (&values)[kPer]) {
    const int lane = threadIdx.x & 31;
    float low = values[0], high = values[0];
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        low = fminf(low, values[i]);
        high = fmaxf(high, values[i]);
        largest = max(largest, __float_as_uint(fabsf(values[i])));
    }
#pragma unroll
    for (int by = kGridWidth / kPer / 2; by > 0; by >>= 1) {
        low = fminf(low, __shfl_xor_sync(~0u, low, by));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, by));
        largest = max(largest, __shfl_xor_sync(~0u, largest, by));
    }
    // With an infinite coordinate, or one that is NaN, the whole grid is NaN.
    const bool finite = largest < 0x7f800000u;
    float offset = 0.0f, step = 0.0f;
    if (finite) S::grid(low, high, offset, step);
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < kPer; i++) codes |= (finite ? S::code(part, values[i], offset, step) : 0) << (i * 4);
    if (kPer == 1) codes |= __shfl_xor_sync(~0u, codes, 1) << 4;
    if (kPer == 2 || lane % 2 == 0) tile[summary_offset(row, part, d)] = (u8)codes;
    if (d % kGridWidth == 0)
        *reinterpret_cast<u32*>(tile + grid_offset(row, part, d / kGridWidth)) =
            finite ? __float_as_uint(offset) | __float_as_uint(step) >> 16 : 0x7fc00000u;
}

// Writes summary row `part` of block `row` of a tile; the lanes of a warp hold its coordinates.
template <class S = Summarizer> DEVICE void store_row(u8* tile, u32 row, int part, const Head& values) {
    const u32 d = (threadIdx.x & 31) * kPer;
    u8 *const low = tile + summary_offset(row, part, d), *const high = tile + summary_offset(row, part, kHalf + d);
    if constexpr (kHasGrid<S>) {
        store_codes<S>(tile, row, part, d, values.low);
        store_codes<S>(tile, row, part, kHalf + d, values.high);
    } else if constexpr (!kHasCodes<S>) {
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
