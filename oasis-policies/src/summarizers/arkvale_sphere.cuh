// arkvale with sphere: the middle of the smallest box around a block's keys, and how far the keys are from it at most.
// score(q, rows) = sum over coordinates d of expand(0, q[d]) * rows[0][d], and the radius times the query's length.
struct Summarizer {
    static constexpr int kRows = 1;
    static constexpr int kSums = 1;

    static __device__ void rows(const float (&keys)[16], float (&rows)[1]) {
        float most = __int_as_float(0xff800000), least = __int_as_float(0x7f800000);
#pragma unroll
        for (int token = 0; token < 16; token++) {
            most = keys[token] > most ? keys[token] : most;
            least = keys[token] < least ? keys[token] : least;
        }
        rows[0] = most / 2.0f + least / 2.0f;
    }

    // NaN coordinates of a query are passed over.
    static __device__ float expand(int row, float q) {
        return q == q ? q : 0.0f;
    }

    // Terms of a key's square distance from the centre as it is stored: rounded, which the radius makes up for.
    static __device__ void measure(float key, const float (&rows)[1], float (&terms)[1]) {
        terms[0] = (key - rows[0]) * (key - rows[0]);
    }

    static __device__ float side_start() {
        return 0.0f;
    }

    // The largest distance so far; NaN stays.
    static __device__ float side_next(float value, const float (&sums)[1]) {
        float distance = sqrtf(sums[0]);
        return distance <= value || value != value ? value : distance;
    }

    // A little more than that, for what the sum of up to 128 squares has lost.
    static __device__ float side_end(float value) {
        return value * (1.0f + 0x1p-18f);
    }

    // What the radius counts for a query whose squares add up to `square`.
    static __device__ float weight(float square) {
        return sqrtf(square);
    }
};
