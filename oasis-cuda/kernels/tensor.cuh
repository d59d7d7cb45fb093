// Copies of boxes of tensors by their maps, and what shares warps of a CTA out to different work.
#pragma once
#include "copy.cuh"

// What the driver encodes; read by the copy engine alone.
struct alignas(128) TensorMap {
    u64 words[16];
};

DEVICE void tensor_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Global to shared memory: the box whose first element is (x, y, z), x the innermost. What lies outside the tensor
// arrives as zeros and counts as bytes; the barrier must expect those.
DEVICE void tensor_in(u32 to, const TensorMap& map, i32 x, i32 y, i32 z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}
// The same for what is read once: it leaves the L2 cache first.
DEVICE void tensor_stream_in(u32 to, const TensorMap& map, i32 x, i32 y, i32 z, u32 barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
        : "memory");
}
// Shared to global memory; what lies outside the tensor is not written. One of the copies out of copy.cuh.
DEVICE void tensor_out(const TensorMap& map, u32 from, i32 x, i32 y, i32 z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits for `THREADS` threads at a barrier of the hardware, 1 to 15; 0 is __syncthreads.
template <int THREADS> DEVICE void named_wait(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Registers of a thread from here on; for all threads of a warpgroup, at the start of its own branch.
template <int COUNT> DEVICE void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> DEVICE void registers_grow() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
