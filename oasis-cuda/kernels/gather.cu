// Carries out a list of copies: entries from mapped host memory to slots, and the few that a completed block needs.
// One warp a CTA drives a ring of bulk copies; no register holds data. A few CTAs with a deep ring fill an idle link;
// beside kernels that keep the device memory busy, more CTAs with shallow rings disturb those less.
//
// -D HEAD_DIM=64|128 STAGES=n (at most 32) STORES=n of them that may still be draining TIMED=0|1
#include "copy.cuh"
#include "layout.cuh"
#include "transfer.cuh"

struct Params {
    CopyList* list;
    const EntryCopy* copies;  // `from` 0 is nothing to do
    LinkStamps* stamps;       // where TIMED: null for copies that do not cross the link
};

static_assert(STORES >= 1 && STORES < STAGES && STAGES <= 32, "a ring of 2 to 32 entries");

extern "C" __global__ void __launch_bounds__(32) gather_entries(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 ring[];
    __shared__ __align__(8) u64 barriers[STAGES];
    __shared__ EntryCopy copies[2][32];
    const i32 lane = threadIdx.x;
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(shared_address(&barriers[i]), 1);
        barrier_init_fence();
    }
    const u32 total = *reinterpret_cast<volatile u32*>(&p.list->count);
    const bool timed = TIMED && lane == 0 && total > 0 && p.stamps != nullptr;
    if (timed && blockIdx.x == 0) p.stamps->began = device_time();
    const i32 begin = (i32)((u64)total * blockIdx.x / gridDim.x);
    const i32 n = (i32)((u64)total * (blockIdx.x + 1) / gridDim.x) - begin;

    i32 issued = 0;
    auto load = [&] {
        if ((issued & 31) == 0) {
            if (issued + lane < n) copies[(issued >> 5) & 1][lane] = p.copies[begin + issued + lane];
            __syncwarp();
        }
        const int stage = issued % STAGES;
        const EntryCopy copy = copies[(issued >> 5) & 1][issued & 31];
        if (lane == 0 && copy.from)
            copy_in(shared_address(ring + stage * kEntryBytes), reinterpret_cast<const u8*>(copy.from), kEntryBytes,
                    shared_address(&barriers[stage]));
        issued++;
    };
    while (issued < n && issued < STAGES - STORES) load();
    // A skipped copy leaves its barrier a phase behind: phases are counted by stage.
    u32 phases = 0;
    for (i32 done = 0; done < n; done++) {
        const int stage = done % STAGES;
        const EntryCopy copy = copies[(done >> 5) & 1][done & 31];
        if (copy.from) {
            barrier_wait(shared_address(&barriers[stage]), phases >> stage & 1);
            phases ^= 1u << stage;
            if (lane == 0) {
                copy_fence();
                copy_out(reinterpret_cast<void*>(copy.to), shared_address(ring + stage * kEntryBytes), kEntryBytes);
            }
        }
        // One group a copy, skipped ones too: the stage that is loaded next was stored STORES groups ago.
        if (lane == 0) {
            copy_out_commit();
            copy_out_wait_read<STORES - 1>();
        }
        __syncwarp();
        if (issued < n) load();
    }
    if (lane != 0) return;
    copy_out_wait_all();
    __threadfence();
    if (atomicAdd(&p.list->finished, 1u) == gridDim.x - 1) {
        p.list->count = 0;
        p.list->finished = 0;
        if (timed) {
            p.stamps->ended = device_time();
            p.stamps->entries = total;
        }
    }
}
