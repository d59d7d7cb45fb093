// The list of copies that selection writes and the gather carries out.
#pragma once
#include "prelude.cuh"

// One entry to be copied; either side may be device memory or mapped host memory.
struct EntryCopy {
    u64 from, to;
};

// What a layer's kernels tell the host of the link, in mapped host memory, where the cap of selections follows it. Times
// are nanoseconds of the device's clock.
struct LinkStamps {
    u64 selected;      // a selection began
    u64 began, ended;  // a gather that carried something
    u64 entries;       // how much; the host sets it back to 0
};

DEVICE u64 device_time() {
    u64 nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// Header of a list; `EntryCopy`s follow in an array of their own.
struct CopyList {
    u32 count;     // copies waiting; the gather sets it back to 0
    u32 finished;  // CTAs of the gather that are done
    // Sums since the start: entries of first working sets, admitted entries, entries that the cap left outside.
    u64 filled, admitted, deferred;
};
