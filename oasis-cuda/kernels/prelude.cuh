// What device code of policies may rely on, version 1: the fixed-width types below, CUDA's built-in functions
// (__float_as_uint, fmaxf, ...) and nothing else; no header of the CUDA toolkit is included anywhere.
//
// A policy's file defines one struct. All functions are static __device__ and pure. A complete example, a summarizer
// whose score is q . (sum of the block's keys):
//
//   struct Summarizer {
//       static constexpr int kRows = 1;                                      // summary rows of a block
//       static __device__ float init(int row) { return 0.0f; }              // row before the first key
//       static __device__ float update(int row, float value, float key) { return value + key; }  // row after a key
//       static __device__ float finish(int row, float value, int tokens) { return value; }
//       static __device__ float expand(int row, float q) { return q; }    // score = sum of expand(r, q[d]) rows[r][d]
//   };
//
// Keys, queries and rows are one coordinate each: bf16 in memory, float here. Instead of init, update and finish a
// summarizer may have all keys of a block at once, for what takes more than one pass:
//
//       static __device__ void rows(const float (&keys)[16], float (&rows)[kRows]);
//
// Optional, for rows of half the bytes: e4m3 codes, a byte a coordinate, times a scale of each row (kRows is 1 or 2).
// A row with a coordinate that is infinite or NaN is NaN and not asked for.
//
//       static __device__ float scale(float largest);  // of a row with this largest magnitude; rounded to bf16
//       static __device__ unsigned code(int row, float value, float scale);  // code of value / scale
//
// Optional, for rows in 4 bits: 32 coordinates of a row share a grid, and a number is offset + code * step. A grid with a
// coordinate that is infinite or NaN is NaN and not asked for.
//
//       static __device__ void grid(float low, float high, float& offset, float& step);  // from low to high, in bf16
//       static __device__ unsigned code(int row, float value, float offset, float step);  // 0 to 15
//
// Optional, for a float beside the rows of a block that comes from whole keys; it adds side * weight to the score:
//
//       static constexpr int kSums = 1;                       // sums over the coordinates of a key
//       static __device__ void measure(float key, const float (&rows)[kRows], float (&terms)[kSums]);  // their terms
//       static __device__ float side_start();                                          // before the first key
//       static __device__ float side_next(float value, const float (&sums)[kSums]);    // after a key
//       static __device__ float side_end(float value);                                 // of a complete block
//       static __device__ float weight(float square);  // of a query whose coordinates' squares add up to this
//
// Rows are as they are stored there: rounded to bf16.
//
// A selector, its orders as unsigned 64-bit keys:
//
//   struct Selector {
//       // Of residents that are not wanted the one with the smallest key leaves first; free slots come before all.
//       static __device__ unsigned long long victim(unsigned last_selected, float score, unsigned slot);
//       // Of wanted blocks that are not resident the one with the largest key enters first.
//       static __device__ unsigned long long admit(float score, unsigned block);
//   };
//
// Optional in a selector: victim with a fourth argument, `unsigned times`, the steps that have wanted the block since it
// came; and what ends admissions. Those for free slots are always gains.
//
//       // Whether a miss of this score may push a resident out, given the largest and the smallest finite score that is
//       // wanted (negative infinity where none is finite).
//       static __device__ bool gains(float score, float best, float worst);
//
// A score of a block that is wanted whatever its score is infinite. A policy's setting is the macro
// POLICY_CONSTANT (DeviceCode::constant), an unsigned 64-bit integer; of a float, its bits.
#pragma once
#define OASIS_PRELUDE_VERSION 1

using i32 = int;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

// bf16 values travel as bits: two in a u32, the lower index in the lower half.
DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float bf16_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Rounds to nearest, ties to even.
DEVICE u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE u16 bf16_bits(float x) { return (u16)bf16_pair(x, 0.0f); }
