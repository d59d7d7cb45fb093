// Matrix products of a warpgroup, m64nNk16 in bf16 with float sums. They run beside the threads: their registers are
// nobody else's until `products_wait` says that they are done.
//
// Operands in shared memory are made of panels [rows][64], 128 bytes a row, as tensor copies with the 128-byte swizzle
// write them: chunk c of 16 bytes of row r lies at c ^ (r & 7). A panel begins at a multiple of 1024 bytes.
#pragma once
#include "prelude.cuh"

// Before the first product after its registers were written by the threads.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products.
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups are under way.
template <int N> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from moving uses of `sums` across this point.
template <int N> DEVICE void hold(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Operands are the lower halves of their descriptors; the upper one is the same for all: swizzle, and 1024 bytes a
// group of 8 rows.
#define UPPER_HALF "0x40000040"
// An operand whose rows hold 64 steps of the sum each: the summed index is the inner one. 8 rows are 1024 bytes.
DEVICE u32 operand(u32 address) { return address >> 4 | 1u << 16; }
// An operand whose rows are steps of the sum, with 64 columns of the product a panel, each `panel_bytes` after another.
DEVICE u32 operand_transposed(u32 address, u32 panel_bytes) { return address >> 4 | panel_bytes >> 4 << 16; }
// Further on within an operand.
DEVICE u32 operand_at(u32 operand, u32 bytes) { return operand + (bytes >> 4); }

// Operands of assembly: a list of sums and their registers.
#define SUMS_32 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define SUMS_64 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define REGISTERS_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define REGISTERS_32(d, i) REGISTERS_8(d, i), REGISTERS_8(d, i + 8), REGISTERS_8(d, i + 16), REGISTERS_8(d, i + 24)
#define REGISTERS_64(d) REGISTERS_32(d, 0), REGISTERS_32(d, 32)

// d += a . b with `a` in registers, as `multiply` of mma.cuh has it a warp, and `b` transposed.
DEVICE void multiply_group(float (&d)[32], const u32 (&a)[4], u32 b) {
    asm volatile("{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, 1, 0; mov.b64 b, {%36, " UPPER_HALF "};"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUMS_32
                 ", {%32, %33, %34, %35}, b, p, 1, 1, 1; }"
                 : REGISTERS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}

// d = a . b, or d += a . b: 64 rows and 16 steps of `a`, 128 columns of `b`.
template <bool ADD> DEVICE void multiply_group(float (&d)[64], u32 a, u32 b) {
    asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0;"
                 "mov.b64 a, {%64, " UPPER_HALF "}; mov.b64 b, {%65, " UPPER_HALF "};"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SUMS_64
                 ", a, b, p, 1, 1, 0, 0; }"
                 : REGISTERS_64(d)
                 : "r"(a), "r"(b), "n"((int)ADD));
}
// d += a . b with `a` in registers, as `multiply` of mma.cuh has it a warp, and `b` transposed.
DEVICE void multiply_group(float (&d)[64], const u32 (&a)[4], u32 b) {
    asm volatile("{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, 1, 0; mov.b64 b, {%68, " UPPER_HALF "};"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SUMS_64
                 ", {%64, %65, %66, %67}, b, p, 1, 1, 1; }"
                 : REGISTERS_64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
