// Brings memory into the L2 cache, to be there when the next kernel asks for it. Nothing waits for the copies.
#include "prelude.cuh"

constexpr u64 kChunk = 8192;

struct Params {
    const u8* data;  // a multiple of 16 bytes, at a multiple of 16
    u64 bytes;
};

extern "C" __global__ void __launch_bounds__(128) prefetch_memory(const __grid_constant__ Params p) {
    const u64 threads = (u64)gridDim.x * 128;
    for (u64 at = ((u64)blockIdx.x * 128 + threadIdx.x) * kChunk; at < p.bytes; at += threads * kChunk) {
        const u32 bytes = (u32)min(kChunk, p.bytes - at);
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p.data + at), "r"(bytes) : "memory");
    }
}
