// One attention head in the registers of a warp: RMSNorm and rotary embedding of queries and keys.
#pragma once
#include "layout.cuh"

constexpr int kHalf = HEAD_DIM / 2;
constexpr int kPer = HEAD_DIM / 64;  // coordinates of each half in a lane: lane * kPer and following

// A lane's coordinates of one head.
struct Head {
    float low[kPer], high[kPer];

    DEVICE static Head load(const u8* row) {
        Head head;
        const int lane = threadIdx.x & 31;
        if constexpr (kPer == 2) {
            const u32* pairs = reinterpret_cast<const u32*>(row);
            const u32 low = pairs[lane], high = pairs[32 + lane];
            head.low[0] = bf16_low(low);
            head.low[1] = bf16_high(low);
            head.high[0] = bf16_low(high);
            head.high[1] = bf16_high(high);
        } else {
            head.low[0] = bf16_float(reinterpret_cast<const u16*>(row)[lane]);
            head.high[0] = bf16_float(reinterpret_cast<const u16*>(row)[32 + lane]);
        }
        return head;
    }
    // Writes the lane's coordinates to the places of those coordinates.
    DEVICE void store(u8* low_at, u8* high_at) const {
        if constexpr (kPer == 2) {
            *reinterpret_cast<u32*>(low_at) = bf16_pair(low[0], low[1]);
            *reinterpret_cast<u32*>(high_at) = bf16_pair(high[0], high[1]);
        } else {
            *reinterpret_cast<u16*>(low_at) = bf16_bits(low[0]);
            *reinterpret_cast<u16*>(high_at) = bf16_bits(high[0]);
        }
    }
    DEVICE void normalise(const u8* weight, float eps) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kPer; i++) sum += low[i] * low[i] + high[i] * high[i];
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        const float scale = rsqrtf(sum / HEAD_DIM + eps);
        const Head w = load(weight);
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            low[i] *= scale * w.low[i];
            high[i] *= scale * w.high[i];
        }
    }
    DEVICE void rotate(const float2* angles) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            const float2 angle = __ldg(angles + lane * kPer + i);
            const float a = low[i], b = high[i];
            low[i] = a * angle.x - b * angle.y;
            high[i] = b * angle.x + a * angle.y;
        }
    }
    DEVICE void round_to_bf16() {
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            low[i] = bf16_float(bf16_bits(low[i]));
            high[i] = bf16_float(bf16_bits(high[i]));
        }
    }
};
