// Bulk copies between global and shared memory, and the barriers that announce them.
#pragma once
#include "prelude.cuh"

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers known to the copy engine.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Global (or mapped host) memory to shared memory; both aligned to 16 bytes, `bytes` a multiple of 16.
DEVICE void copy_in(u32 to, const void* from, u32 bytes, u32 barrier) {
    barrier_expect(barrier, bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// The same for what is read once: it leaves the L2 cache first.
DEVICE void stream_in(u32 to, const void* from, u32 bytes, u32 barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    barrier_expect(barrier, bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
DEVICE void copy_out(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
// Closes the group of copies out since the last call; a group may be empty.
DEVICE void copy_out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most N groups of copies out still read shared memory.
template <int N> DEVICE void copy_out_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
DEVICE void copy_out_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders this thread's use of shared memory before later bulk copies out of it or into it.
DEVICE void copy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
