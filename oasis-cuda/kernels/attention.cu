// Decode attention: 1 or 2 query tokens of each request over its blocks and its tail.
//
// The slots of a (request, KV head) are one run of entries and softmax does not care about their order: they are
// streamed, not looked up. All entries of the batch form one line that is cut into equal parts, one a CTA, whatever the
// lengths of the requests; a head that is cut is put together by the CTA that finishes it last, in a fixed order.
//
// -D HEAD_DIM=64|128 GROUP=1..16 QUERIES=1|2 STAGES=n PAGED=0|1
#include "copy.cuh"
#include "layout.cuh"
#include "mma.cuh"
#include "overlap.cuh"
#include "work.cuh"

constexpr int kRows = QUERIES * GROUP;  // row of the tile = token * GROUP + head of the group
constexpr int kTiles = (kRows + 15) / 16;
constexpr int kWarps = 4;
constexpr int kSteps = HEAD_DIM / 16;
constexpr int kColumns = HEAD_DIM / 8;
constexpr float kMasked = -1e30f;

// Shared memory: kWarps rings of STAGES entries, then what the warps put together.
struct Merge {
    float out[kWarps][8][HEAD_DIM + 8];  // padded: the rows of a fragment lie in different banks
    float max[kWarps][8], sum[kWarps][8];
};

// What one CTA adds to a head that others work on too.
struct alignas(16) Partial {
    float out[kRows][HEAD_DIM];
    float max[kRows], sum[kRows];
};

// `partial[c][1]` is CTA c's part of a head that it begins, `[0]` that of one that an earlier CTA began.
struct Params {
    const u8* q;          // bf16 [requests][QUERIES][kv_heads * GROUP][HEAD_DIM]
    const u8* entries;    // slots: [requests][kv_heads][slots] entries; paged: [pages][kv_heads] entries
    const i32* pages;     // paged: [requests][slots] page of each block; those before the entries are not looked up
    const u8* tail;       // [requests][kv_heads][2] entries, block b lies at b % 2; null: the tail has pages too
    const i32* start;     // [requests + 1] entries of a KV head, tail included, before each request
    const i32* position;  // [requests] position of the first query token
    u8* out;              // bf16, as q
    Partial* partial;     // [CTAs][2]
    u32* arrived;         // [requests][kv_heads], zero between launches
    i32 requests, kv_heads, slots;
    float scale;          // log2(e) / sqrt(HEAD_DIM)
};

// Address of the entry under the cursor.
DEVICE const u8* entry_address(const Params& p, const Cursor& at, i32 position, i32 full) {
    const i32 index = at.index();
    if (index >= full && (!PAGED || p.tail)) {
        const i32 block = position / kBlock + index - full;
        return p.tail + ((u64)at.pair() * 2 + (block & 1)) * kEntryBytes;
    }
#if PAGED
    // Where the schedule names fewer entries than there are blocks, they are the newest.
    const i32 block = index + (position + QUERIES - 1) / kBlock + 1 - at.units();
    return p.entries + ((u64)__ldg(p.pages + (u64)at.request * p.slots + block) * p.kv_heads + at.head) * kEntryBytes;
#else
    return p.entries + ((u64)at.pair() * p.slots + index) * kEntryBytes;
#endif
}
// Entries of the request under the cursor that are not its tail.
DEVICE i32 full_entries(const Cursor& at, i32 position) {
    return at.units() - ((position + QUERIES - 1) / kBlock - position / kBlock + 1);
}

// Output of one KV head so far, in a warp's registers.
struct Accumulator {
    float out[kTiles][kColumns][4], max[kTiles][2], sum[kTiles][2];

    DEVICE void clear() {
#pragma unroll
        for (int m = 0; m < kTiles; m++) {
            max[m][0] = max[m][1] = kMasked;
            sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
            for (int n = 0; n < kColumns; n++) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.0f;
        }
    }

    // Adds the 16 keys of an entry. Tail: token t sees those up to key `newest` + t.
    DEVICE void add(const u32 (&q)[kTiles][kSteps][4], u32 entry, float scale, bool tail, i32 newest) {
        const u32 lane = threadIdx.x & 31;
        const u32 key = (lane & 7) + ((lane >> 4) << 3), value = lane & 15;
        const u32 keys = entry + key * kKeyRowBytes + ((((lane >> 3) & 1) ^ (key & 7)) << 4);
        const u32 values = entry + kHalfEntryBytes + value * kKeyRowBytes + (((lane >> 4) ^ (value & 7)) << 4);
        float s[kTiles][2][4];
#pragma unroll
        for (int m = 0; m < kTiles; m++)
#pragma unroll
            for (int n = 0; n < 2; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll
        for (int k = 0; k < kSteps; k++) {
            u32 fragment[4];
            load_matrices(fragment, keys ^ (k << 5));
#pragma unroll
            for (int m = 0; m < kTiles; m++) {
                multiply(s[m][0], q[m][k], fragment[0], fragment[1]);
                multiply(s[m][1], q[m][k], fragment[2], fragment[3]);
            }
        }
        u32 p[kTiles][4];
#pragma unroll
        for (int m = 0; m < kTiles; m++) {
            if (tail) mask(s[m], m, newest);
            softmax(s[m], p[m], m, scale);
        }
#pragma unroll
        for (int n = 0; n < kColumns; n += 2) {
            u32 fragment[4];
            load_matrices_transposed(fragment, values ^ (n << 4));
#pragma unroll
            for (int m = 0; m < kTiles; m++) {
                multiply(out[m][n], p[m], fragment[0], fragment[1]);
                multiply(out[m][n + 1], p[m], fragment[2], fragment[3]);
            }
        }
    }

    DEVICE static void mask(float (&s)[2][4], int m, i32 newest) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = m * 16 + (lane >> 2) + (i >> 1) * 8;
                if (n * 8 + (lane & 3) * 2 + (i & 1) > newest + row / GROUP) s[n][i] = kMasked;
            }
    }

    // Scores of 16 keys to weights `p`, with `out`, `max` and `sum` brought to the new maximum.
    DEVICE void softmax(float (&s)[2][4], u32 (&p)[4], int m, float scale) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float best = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            if (__any_sync(~0u, best > max[m][h])) {
                const float next = fmaxf(max[m][h], best), factor = exp2_approx((max[m][h] - next) * scale);
                max[m][h] = next;
                sum[m][h] *= factor;
#pragma unroll
                for (int n = 0; n < kColumns; n++) {
                    out[m][n][2 * h] *= factor;
                    out[m][n][2 * h + 1] *= factor;
                }
            }
            // A row that has seen nothing but masked keys weighs nothing.
            const float base = max[m][h] > 0.1f * kMasked ? max[m][h] * scale : 1e30f;
            auto weight = [&](float score) { return exp2_approx(fmaf(score, scale, -base)); };
            const float e0 = weight(s[0][2 * h]), e1 = weight(s[0][2 * h + 1]);
            const float e2 = weight(s[1][2 * h]), e3 = weight(s[1][2 * h + 1]);
            sum[m][h] += (e0 + e1) + (e2 + e3);
            p[h] = bf16_pair(e0, e1);
            p[2 + h] = bf16_pair(e2, e3);
        }
    }
};

// Four coordinates of a row, with its maximum and sum, put together part by part.
struct Row {
    float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
    float max = kMasked, sum = 0.0f;

    DEVICE void add(float4 part, float part_max, float part_sum, float scale) {
        const float next = fmaxf(max, part_max);
        const float old = exp2_approx((max - next) * scale), fresh = exp2_approx((part_max - next) * scale);
        out.x = out.x * old + part.x * fresh;
        out.y = out.y * old + part.y * fresh;
        out.z = out.z * old + part.z * fresh;
        out.w = out.w * old + part.w * fresh;
        sum = sum * old + part_sum * fresh;
        max = next;
    }
};

// Zeroes the values of an entry from key `seen` on: what an earlier request left there may be NaN, and a weight of 0 does
// not make that harmless.
DEVICE void clear_unseen(u32 entry, i32 seen) {
#pragma unroll 1
    for (u32 at = seen * kKeyRowBytes + (threadIdx.x & 31) * 16; at < kHalfEntryBytes; at += 512)
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(entry + kHalfEntryBytes + at), "r"(0) : "memory");
    copy_fence();
    __syncwarp();
}

// Number of the query head, among those of all tokens, that row `row` of the tile is.
DEVICE u32 query_head(const Params& p, const Cursor& at, u32 row) {
    const u32 token = row / GROUP, member = row - token * GROUP;
    return ((u32)at.request * QUERIES + token) * (u32)p.kv_heads * GROUP + (u32)at.head * GROUP + member;
}

DEVICE void write_row(const Params& p, const Cursor& at, int row, int d, const Row& value) {
    const float inverse = value.sum > 0.0f ? 1.0f / value.sum : (value.sum == 0.0f ? 0.0f : value.sum);
    const u64 head = query_head(p, at, (u32)row);
    const uint2 bits = {bf16_pair(value.out.x * inverse, value.out.y * inverse),
                        bf16_pair(value.out.z * inverse, value.out.w * inverse)};
    *reinterpret_cast<uint2*>(p.out + (head * HEAD_DIM + d) * 2) = bits;
}

// Puts the parts of a warp's rows together: all loads of a round are under way at once, since nothing hides their latency.
DEVICE void merge_parts(const Params& p, const Cursor& at, i32 first, i32 last) {
    constexpr int kMerged = (kRows + kWarps - 1) / kWarps;  // rows of a warp: warp, warp + kWarps, ...
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, d = lane * 4;
    auto part_of_cta = [&](i32 cta) -> const Partial& { return p.partial[cta * 2 + (cta == first ? 1 : 0)]; };
    Row rows[kMerged];
    for (i32 base = first; base <= last; base += 32) {
        const bool real = base + lane <= last;
        const Partial& mine = part_of_cta(real ? base + lane : first);
        float max[kMerged], sum[kMerged], weight[kMerged];
#pragma unroll
        for (int i = 0; i < kMerged; i++) {
            const int row = min(warp + i * kWarps, kRows - 1);
            max[i] = real ? __ldcg(&mine.max[row]) : kMasked;
            sum[i] = real ? __ldcg(&mine.sum[row]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kMerged; i++) {
            float best = fmaxf(max[i], rows[i].max);
#pragma unroll
            for (int j = 16; j > 0; j >>= 1) best = fmaxf(best, __shfl_xor_sync(~0u, best, j));
            const float old = exp2_approx((rows[i].max - best) * p.scale);
            weight[i] = real ? exp2_approx((max[i] - best) * p.scale) : 0.0f;
            float total = weight[i] * sum[i];
#pragma unroll
            for (int j = 16; j > 0; j >>= 1) total += __shfl_xor_sync(~0u, total, j);
            rows[i].sum = rows[i].sum * old + total;
            rows[i].max = best;
            rows[i].out.x *= old;
            rows[i].out.y *= old;
            rows[i].out.z *= old;
            rows[i].out.w *= old;
        }
        const int count = min(32, last - base + 1);
#pragma unroll 4
        for (int j = 0; j < count; j++) {
            const Partial& part = part_of_cta(base + j);
#pragma unroll
            for (int i = 0; i < kMerged; i++) {
                const float factor = __shfl_sync(~0u, weight[i], j);
                if (d >= HEAD_DIM) continue;
                const int row = min(warp + i * kWarps, kRows - 1);
                const float4 out = __ldcg(reinterpret_cast<const float4*>(&part.out[row][d]));
                rows[i].out.x += factor * out.x;
                rows[i].out.y += factor * out.y;
                rows[i].out.z += factor * out.z;
                rows[i].out.w += factor * out.w;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kMerged; i++)
        if (d < HEAD_DIM && warp + i * kWarps < kRows) write_row(p, at, warp + i * kWarps, d, rows[i]);
}

// Puts the warps' outputs of one head together; the head's output where this CTA has all of it, else its part.
DEVICE void finish_head(const Params& p, const Cursor& at, Accumulator& sums, Merge& merge, i32 begin, i32 end,
                        const Parts& parts) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const bool whole = at.head_begin >= begin && at.head_end <= end;
    Partial& mine = p.partial[blockIdx.x * 2 + (at.head_begin < begin ? 0 : 1)];
#pragma unroll
    for (int m = 0; m < kTiles; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int first = m * 16 + h * 8;
            if (first >= kRows) continue;
            float sum = sums.sum[m][h];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int r = lane >> 2;
#pragma unroll
            for (int n = 0; n < kColumns; n++)
                *reinterpret_cast<float2*>(&merge.out[warp][r][n * 8 + (lane & 3) * 2]) =
                    make_float2(sums.out[m][n][2 * h], sums.out[m][n][2 * h + 1]);
            if ((lane & 3) == 0) {
                merge.max[warp][r] = sums.max[m][h];
                merge.sum[warp][r] = sum;
            }
            __syncthreads();
            for (int i = threadIdx.x; i < 8 * (HEAD_DIM / 4); i += kWarps * 32) {
                const int row = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
                if (first + row >= kRows) break;
                Row value;
#pragma unroll
                for (int w = 0; w < kWarps; w++)
                    value.add(*reinterpret_cast<float4*>(&merge.out[w][row][d]), merge.max[w][row], merge.sum[w][row],
                              p.scale);
                if (whole) {
                    write_row(p, at, first + row, d, value);
                } else {
                    __stcg(reinterpret_cast<float4*>(&mine.out[first + row][d]), value.out);
                    if (d == 0) {
                        __stcg(&mine.max[first + row], value.max);
                        __stcg(&mine.sum[first + row], value.sum);
                    }
                }
            }
            __syncthreads();
        }
    if (whole) return;

    const i32 first = parts.of(at.head_begin), last = parts.of(at.head_end - 1);
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(p.arrived + at.pair(), 1) == last - first;
        if (is_last) p.arrived[at.pair()] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    merge_parts(p, at, first, last);
}

DEVICE void load_queries(const Params& p, const Cursor& at, u32 (&q)[kTiles][kSteps][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < kTiles; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = m * 16 + (lane >> 2) + i * 8;
            const u64 head = query_head(p, at, (u32)row);
            const u32* source = reinterpret_cast<const u32*>(p.q + head * HEAD_DIM * 2) + (lane & 3);
#pragma unroll
            for (int k = 0; k < kSteps; k++) {
                q[m][k][i] = row < kRows ? __ldg(source + k * 8) : 0u;
                q[m][k][i + 2] = row < kRows ? __ldg(source + k * 8 + 4) : 0u;
            }
        }
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, 2) decode_attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ __align__(8) u64 barriers[kWarps][STAGES];
    next_may_begin();
    const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i32 total = __ldg(p.start + p.requests) * p.kv_heads;
    const i32 ctas = min((i32)gridDim.x, max(1, total / kWarps));
    if (total == 0 || blockIdx.x >= ctas) return;
    const Parts parts(total, ctas);
    const i32 begin = parts.begin(blockIdx.x), end = parts.begin(blockIdx.x + 1);
    u8* ring = shared + warp * STAGES * kEntryBytes;
    Merge& merge = *reinterpret_cast<Merge*>(shared + kWarps * STAGES * kEntryBytes);
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(shared_address(&barriers[warp][i]), 1);
        barrier_init_fence();
    }
    __syncwarp();

    // Warp w takes units begin + w, begin + w + kWarps, ...; copies run STAGES ahead of the arithmetic.
    Cursor at(Starts(p.start, p.requests), p.kv_heads, begin);
    Cursor ahead = at;
    i32 ahead_request = -1, ahead_position = 0;
    const u8* source = nullptr;
    auto locate = [&](i32 by) {
        if (ahead.at + by >= end) {
            ahead.at = end;
            return;
        }
        ahead.advance(by);
        if (ahead.request != ahead_request) {
            ahead_request = ahead.request;
            ahead_position = __ldg(p.position + ahead_request);
        }
        source = entry_address(p, ahead, ahead_position, full_entries(ahead, ahead_position));
    };
    auto copy_next = [&](int stage) {
        if (ahead.at >= end) return;
        if (lane == 0)
            stream_in(shared_address(ring + stage * kEntryBytes), source, kEntryBytes,
                      shared_address(&barriers[warp][stage]));
        locate(kWarps);
    };
    locate(warp);
#pragma unroll
    for (int i = 0; i < STAGES; i++) copy_next(i);

    u32 q[kTiles][kSteps][4];
    Accumulator sums;
    i32 next = begin + warp, stage = 0, parity = 0;
    while (true) {
        load_queries(p, at, q);
        sums.clear();
        const i32 stop = min(end, at.head_end), position = __ldg(p.position + at.request);
        // Key of the request's own token, with all entries of the line in one row of keys.
        const i32 own = position % kBlock + (at.head_begin + full_entries(at, position)) * kBlock;
        for (; next < stop; next += kWarps) {
            // The same, counted from this entry's first: in full entries it lies beyond the last.
            const i32 newest = own - next * kBlock;
            const u32 entry = shared_address(ring + stage * kEntryBytes);
            barrier_wait(shared_address(&barriers[warp][stage]), parity);
            if (newest < kBlock) clear_unseen(entry, newest + QUERIES);
            sums.add(q, entry, p.scale, newest < kBlock, newest);
            __syncwarp();
            copy_next(stage);
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        finish_head(p, at, sums, merge, begin, end, parts);
        if (stop == end) break;
        at.advance(stop - at.at);
    }
}
