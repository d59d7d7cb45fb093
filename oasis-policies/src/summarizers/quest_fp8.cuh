// quest-fp8: the rows of quest as e4m3 codes times a power of two, maxima rounded up and minima down.
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

    // The smallest power of two, 2^-126 at least, that brings `largest` into the range of e4m3, which ends at 448.
    static __device__ float scale(float largest) {
        int exponent = (int)(__float_as_uint(largest) >> 23) - 127 - 8;
        float power = __int_as_float((max(exponent, -126) + 127) << 23);
        return largest > 448.0f * power ? 2.0f * power : power;
    }

    // The code next to value / scale that is not below it (row 0), or not above it (row 1).
    static __device__ unsigned code(int row, float value, float scale) {
        // The inverse of a power of two: 2^-120 to 2^126.
        float size = fabsf(value) * __uint_as_float((254u << 23) - __float_as_uint(scale));
        // Below the smallest normal number, 2^-6, codes count 2^-9; above it they are exponent and three bits of mantissa.
        unsigned code = size < 0.015625f ? (unsigned)(size * 512.0f) : (__float_as_uint(size) >> 20) - (120u << 3);
        float below = __uint_as_float(code << 20) * __uint_as_float((127u + 120u) << 23);
        bool negative = __float_as_uint(value) >> 31;
        // What is too small for `size` counts as well.
        bool inexact = below < size || (code == 0 && value != 0.0f);
        if (inexact && (row == 0) != negative) code += 1;
        return code | (negative ? 0x80u : 0u);
    }
};
