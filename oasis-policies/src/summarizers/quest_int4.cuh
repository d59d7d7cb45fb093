// quest-int4: the rows of quest in 4 bits; 32 coordinates of a row share an offset and a step. Maxima are rounded up and
// minima down.
// Linear: score(q, rows) = sum over rows r and coordinates d of expand(r, q[d]) * rows[r][d].
struct Summarizer {
    static constexpr int kRows = 2;

    // Value of a summary row before the first key.
    static __device__ float init(int row) {
        return __int_as_float(row == 0 ? 0xff800000 : 0x7f800000);
    }

    // Row after one more key; NaN keys are passed over.
    static __device__ float update(int row, float value, float key) {
        return row == 0 ? (key > value ? key : value) : (key < value ? key : value);
    }

    // Row of a complete block of `tokens` keys.
    static __device__ float finish(int row, float value, int tokens) {
        return value;
    }

    static __device__ float expand(int row, float q) {
        return row == 0 ? (q > 0.0f ? q : 0.0f) : (q < 0.0f ? q : 0.0f);
    }

    // The smallest bf16 at or above `x`, which is not negative.
    static __device__ float above(float x) {
        return __uint_as_float((__float_as_uint(x) + 0xffffu) & 0xffff0000u);
    }

    // The finest grid, in bf16, from at or below `low` to at or above `high`.
    static __device__ void grid(float low, float high, float& offset, float& step) {
        offset = __uint_as_float(__float_as_uint(low) & 0xffff0000u);
        if (offset > low) offset = __uint_as_float(__float_as_uint(offset) + 0x10000u);
        step = above((float)(((double)high - (double)offset) / 15.0));
        // The last product may still be rounded below.
        while (fmaf(15.0f, step, offset) < high) step = above(__uint_as_float(__float_as_uint(step) + 1u));
    }

    // The code nearest to `value` that is at or above it (row 0), or at or below it (row 1).
    static __device__ unsigned code(int row, float value, float offset, float step) {
        if (step == 0.0f) return 0;  // one value only
        const double steps = ((double)value - (double)offset) / (double)step;
        unsigned code = (unsigned)min(row == 0 ? ceil(steps) : floor(steps), 15.0);
        while (row == 0 && code < 15 && fmaf((float)code, step, offset) < value) code += 1;
        while (row == 1 && code > 0 && fmaf((float)code, step, offset) > value) code -= 1;
        return code;
    }
};
