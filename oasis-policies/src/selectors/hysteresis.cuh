// Order of admissions and victims of hysteresis, and which admissions are gains. POLICY_CONSTANT holds the bits of the
// margin, a double.
struct Selector {
    // Among residents that are not wanted the one with the smallest key leaves first: least recently wanted, then
    // lowest slot.
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

    // Whether a miss may push a resident out: its score lies the margin above the lowest finite one that is wanted, in
    // parts of the range of those. Rounded step by step, as the CPU does.
    static __device__ bool gains(float score, float best, float worst) {
        double margin = __longlong_as_double((long long)POLICY_CONSTANT);
        if (margin == 0.0) return true;
        if (best == __int_as_float(0xff800000)) return score == score;  // none is finite
        return (double)score >= __dadd_rn(worst, __dmul_rn(margin, __dsub_rn(best, worst)));
    }
};
