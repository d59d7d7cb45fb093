// Order of admissions and victims of capped-lru, fetch-all, static and adaptive-cap.
struct Selector {
    // Among residents that are not wanted the one with the smallest key leaves first: least recently wanted, then
    // lowest slot. Free slots come before all residents and are no concern of the policy.
    static __device__ unsigned long long victim(unsigned last_selected, float score, unsigned slot) {
        return (unsigned long long)last_selected << 32 | slot;
    }

    // Among wanted blocks that are not resident the one with the largest key enters first: best score, then lowest
    // block; -0 equals 0, NaN comes last.
    static __device__ unsigned long long admit(float score, unsigned block) {
        unsigned bits = __float_as_uint(score == 0.0f ? 0.0f : score);
        unsigned order = score != score ? 0u : (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
        return (unsigned long long)order << 32 | ~block;
    }
};
