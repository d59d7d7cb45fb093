// mean: a block's summary is the mean of its keys.
// Linear: score(q, rows) = sum over coordinates d of expand(0, q[d]) * rows[0][d].
struct Summarizer {
    static constexpr int kRows = 1;

    // Value of a summary row before the first key.
    static __device__ float init(int row) {
        return 0.0f;
    }

    // Row after one more key.
    static __device__ float update(int row, float value, float key) {
        return value + key;
    }

    // Row of a complete block of `tokens` keys.
    static __device__ float finish(int row, float value, int tokens) {
        return value / tokens;
    }

    // NaN coordinates of a query are passed over.
    static __device__ float expand(int row, float q) {
        return q == q ? q : 0.0f;
    }
};
