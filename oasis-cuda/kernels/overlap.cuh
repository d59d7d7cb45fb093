// Kernels of a stream that overlap: one lets the next begin, which waits before it touches what earlier ones wrote or read.
// What such a kernel reads after the wait it reads by plain loads: others may be moved before it.
#pragma once
#include "prelude.cuh"

// Lets the next kernel begin once all CTAs are here, where it is one that waits.
DEVICE void next_may_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the kernel before is done, which waited in its turn, and what it wrote is there.
DEVICE void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
