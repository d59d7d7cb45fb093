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
// Keys, queries and rows are one coordinate each: bf16 in memory, float here.
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
