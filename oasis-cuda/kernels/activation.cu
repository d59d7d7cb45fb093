// SwiGLU: out = silu(gate) * up, 8 coordinates a thread.
#include "overlap.cuh"

struct Params {
    const uint4* gate_up;  // bf16 [rows][2][width]: the gates of a row, then its ups
    uint4* out;            // bf16 [rows][width]
    i32 rows, width;       // width a multiple of 8
};

DEVICE u32 gated(u32 gate, u32 up) {
    const float low = bf16_low(gate), high = bf16_high(gate);
    return bf16_pair(low / (1.0f + __expf(-low)) * bf16_low(up), high / (1.0f + __expf(-high)) * bf16_high(up));
}

extern "C" __global__ void __launch_bounds__(256) swiglu(const __grid_constant__ Params p) {
    next_may_begin();
    wait_for_last();
    const i32 groups = p.width / 8, i = blockIdx.x * 256 + threadIdx.x;
    if (i >= p.rows * groups) return;
    const i32 row = i / groups, column = i % groups;
    const uint4 gate = p.gate_up[(u64)row * 2 * groups + column];
    const uint4 up = p.gate_up[((u64)row * 2 + 1) * groups + column];
    p.out[i] = {gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w)};
}
