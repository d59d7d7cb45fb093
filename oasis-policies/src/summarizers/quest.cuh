// quest: row 0 of a block's summary is the coordinate-wise maximum of its keys, row 1 the minimum.
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
};
