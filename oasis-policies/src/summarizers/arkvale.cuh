// arkvale with cuboid-mean: around the middle of the smallest box, a box that reaches as far as the keys do on average.
// Linear: score(q, rows) = sum over rows r and coordinates d of expand(r, q[d]) * rows[r][d].
struct Summarizer {
    static constexpr int kRows = 2;

    // Both rows of one coordinate, from that coordinate of a block's keys: two passes over them.
    static __device__ void rows(const float (&keys)[16], float (&rows)[2]) {
        float most = __int_as_float(0xff800000), least = __int_as_float(0x7f800000), sum = 0.0f;
#pragma unroll
        for (int token = 0; token < 16; token++) {
            most = keys[token] > most ? keys[token] : most;
            least = keys[token] < least ? keys[token] : least;
        }
        float centre = most / 2.0f + least / 2.0f;
#pragma unroll
        for (int token = 0; token < 16; token++) sum += fabsf(keys[token] - centre);
        rows[0] = centre + sum / 16.0f;
        rows[1] = centre - sum / 16.0f;
    }

    static __device__ float expand(int row, float q) {
        return row == 0 ? (q > 0.0f ? q : 0.0f) : (q < 0.0f ? q : 0.0f);
    }
};
