// Where keys, values and summaries lie, layout version 3. The Rust side declares the same in src/layout.rs.
//
// entry    one block of one KV head: K[kBlock][HEAD_DIM] then V[kBlock][HEAD_DIM], bf16
// summary  one block of one KV head: [rows][HEAD_DIM] in bf16, in e4m3 or in 4 bits, as one row of a tile of kBlock blocks;
//          what else a form needs follows behind the rows of all blocks (summary.cuh)
// In both, 16-byte chunk c of row r lies at chunk c ^ (r % 8) of that row: a plain bulk copy then gives shared memory
// that matrix loads read without bank conflicts.
//
// -D HEAD_DIM=64|128
#pragma once
#include "prelude.cuh"

#define OASIS_LAYOUT_VERSION 3

constexpr int kBlock = 16;
constexpr u32 kKeyRowBytes = HEAD_DIM * 2;
constexpr u32 kHalfEntryBytes = kBlock * kKeyRowBytes;
constexpr u32 kEntryBytes = 2 * kHalfEntryBytes;

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "HEAD_DIM is 64 or 128");

// Byte of coordinate `d` in row `row` of keys or values.
DEVICE u32 key_offset(u32 row, u32 d) { return row * kKeyRowBytes + (((d >> 3) ^ (row & 7)) << 4) + ((d & 7) << 1); }
