// The same orders and the same bound as `plan`.
struct Selector {
    // The smallest key leaves first: least recently wanted, then lowest slot.
    static __device__ unsigned long long victim(unsigned last_selected, float score, unsigned slot) {
        return (unsigned long long)last_selected << 32 | slot;
    }

    // The largest key enters first: best score, then lowest block; -0 equals 0, NaN comes last.
    static __device__ unsigned long long admit(float score, unsigned block) {
        unsigned bits = __float_as_uint(score == 0.0f ? 0.0f : score);
        unsigned order = score != score ? 0u : (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
        return (unsigned long long)order << 32 | ~block;
    }

    // Both products are exact: a fused addition rounds as the CPU's does.
    static __device__ bool gains(float score, float best, float worst) {
        return score >= 0.5f * best + 0.5f * worst;
    }
};
