// shadowkv: the mean of a block's keys, and what raises the score of a block with a key unlike it. POLICY_CONSTANT holds
// the bits of the similarity below which a key is, a float.
// score(q, rows) = sum over coordinates d of expand(0, q[d]) * rows[0][d], and what the block is raised by.
struct Summarizer {
    static constexpr int kRows = 1;
    static constexpr int kSums = 3;

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

    // Terms of a key's product with the mean, and of the squares of both.
    static __device__ void measure(float key, const float (&rows)[1], float (&terms)[3]) {
        terms[0] = key * rows[0];
        terms[1] = key * key;
        terms[2] = rows[0] * rows[0];
    }

    static __device__ float side_start() {
        return 1.0f;
    }

    // The least similarity so far; NaN, of keys that are zero or NaN, is passed over.
    static __device__ float side_next(float value, const float (&sums)[3]) {
        return fminf(value, sums[0] / (sqrtf(sums[1]) * sqrtf(sums[2])));
    }

    // Beyond every dot product where a key is too unlike the mean, the least similar ones first.
    static __device__ float side_end(float value) {
        return value < __uint_as_float((unsigned)POLICY_CONSTANT) ? 1e30f * (2.0f - value) : 0.0f;
    }

    static __device__ float weight(float square) {
        return 1.0f;
    }
};
