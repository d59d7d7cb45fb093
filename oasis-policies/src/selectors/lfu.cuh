// Order of admissions and victims of lfu.
struct Selector {
    // Among residents that are not wanted the one with the smallest key leaves first: wanted by the fewest steps since it
    // came, then least recently wanted; equal keys go by slot.
    static __device__ unsigned long long victim(unsigned last_selected, float score, unsigned slot, unsigned times) {
        return (unsigned long long)times << 32 | last_selected;
    }

    // Among wanted blocks that are not resident the one with the largest key enters first: best score, then lowest
    // block; -0 equals 0, NaN comes last.
    static __device__ unsigned long long admit(float score, unsigned block) {
        unsigned bits = __float_as_uint(score == 0.0f ? 0.0f : score);
        unsigned order = score != score ? 0u : (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
        return (unsigned long long)order << 32 | ~block;
    }
};
