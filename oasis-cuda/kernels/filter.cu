// Which tokens top-k and top-p leave, for every row, one CTA a row.
//
// Tokens are ordered by logit, the lower token first among equals; NaN and negative infinity are out. Top-k keeps the
// first k. Top-p then keeps the fewest, first ones, whose weights exp((logit - largest) / temperature) reach the share
// p of what top-k kept. Both are searches for a logit by its bits, 11 at a time, over histograms: no row is sorted. A
// first look at the row gives a logit that some, but not many, reach: where those suffice, only they are searched.
//
// Weights are summed as integers, so that the order of arrival does not change the outcome.
#include "logits.cuh"

struct Params {
    const float* logits;       // [rows][vocab]
    const float* temperature;  // [rows], 0 is greedy
    const i32* top_k;          // [rows], 0 keeps all, 1 is greedy
    const float* top_p;        // [rows], 1 keeps all
    u64* cut;                  // [rows], written: what `place_of` a token must reach; 0: all tokens, ~0: greedy
    i32 vocab;                 // at most 2^18
};

constexpr int kThreads = 1024, kLoads = 3, kBuckets = 2048, kFront = 7168;
constexpr u32 kSurely = kThreads / 2;  // tokens that reach the logit of the first look, if it is any
constexpr int kPartBits = 14;  // a weight is three such parts: sums of 2^18 of them fit in 32 bits
constexpr double kOne = (double)(1ull << (3 * kPartBits - 1));

struct Shared {
    u32 count[kBuckets], part[3][kBuckets];
    u64 warp_weight[32];
    u32 warp_count[32];
    i32 bucket;  // what the last pass found, -1 for nothing
    u32 inside, above;
    u64 weight_above;
    u32 in_front;
};

// kOne * exp(x) for x <= 0, to 14 digits.
DEVICE u64 weight_of(double x) {
    // exp(-32) is less than half of the last digit.
    if (!(x > -32.0)) return 0;
    const double scaled = x * 1.4426950408889634, whole = rint(scaled), t = (scaled - whole) * 0.6931471805599453;
    constexpr double kInverse[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                   1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2,     1.0,        1.0};
    double sum = kInverse[0];
#pragma unroll
    for (int i = 1; i < 12; i++) sum = fma(sum, t, kInverse[i]);
    return __double2ull_rn(sum * __hiloint2double(((i32)whole + 1023) << 20, 0) * kOne);
}

struct Row {
    const float* logits;
    i32 vocab;
    u64 lower;  // tokens whose place is below are out
    double largest, inverse;  // of the logits; of the temperature
    const u64* front;         // places of the tokens to search, null: the whole row
    u32 in_front;

    // Calls f(order, token) for this thread's tokens that are not out.
    template <typename F> DEVICE void each(F f) const {
        if (front) {
            for (u32 i = threadIdx.x; i < in_front; i += kThreads)
                if (front[i] >= lower) f((u32)(front[i] >> 32), token_at(front[i]));
            return;
        }
        each_logit<kLoads>(logits, vocab, threadIdx.x, kThreads, [&](float logit, i32 token) {
            const u32 key = order_of(logit);
            if (logit > -infinity() && place_of(key, token) >= lower) f(key, token);
        });
    }
    DEVICE u64 weight(u32 key) const { return weight_of(((double)logit_of(key) - largest) * inverse); }
};

// A logit that is searched for from its highest bits down.
struct Search {
    u32 prefix, above, ties;  // bits so far; tokens in front of those that have them; tokens that have all of them
    u64 weight_above;  // weight in front
};

// One digit: histograms of the tokens that share the prefix, then the first bucket, from the top, with which `enough`
// holds. False where there is none.
template <int kShift, int kBits, bool kWeights, typename Enough>
DEVICE bool pass(Shared& shared, const Row& row, Search& search, Enough enough) {
    const i32 t = threadIdx.x, lane = t & 31, warp = t >> 5;
    for (i32 i = t; i < kBuckets; i += kThreads) {
        shared.count[i] = 0;
#pragma unroll
        for (int part = 0; part < 3; part++) shared.part[part][i] = 0;
    }
    if (t == 0) shared.bucket = -1;
    __syncthreads();
    row.each([&](u32 key, i32) {
        if ((kShift + kBits < 32 && key >> ((kShift + kBits) & 31) != search.prefix)) return;
        const u32 bucket = key >> kShift & ((1u << kBits) - 1);
        atomicAdd(shared.count + bucket, 1u);
        if (!kWeights) return;
        const u64 weight = row.weight(key);
#pragma unroll
        for (int part = 0; part < 3; part++) {
            const u32 bits = (u32)(weight >> (part * kPartBits)) & ((1u << kPartBits) - 1);
            if (bits) atomicAdd(shared.part[part] + bucket, bits);
        }
    });
    __syncthreads();
    // Each thread has two buckets, the highest first, and what lies in front of them.
    u32 counts[2], count = 0;
    u64 weights[2], weight = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const i32 bucket = kBuckets - 1 - 2 * t - i;
        counts[i] = shared.count[bucket];
        weights[i] = 0;
#pragma unroll
        for (int part = 0; part < 3; part++) weights[i] += (u64)shared.part[part][bucket] << (part * kPartBits);
        count += counts[i];
        weight += weights[i];
    }
    const u32 own_count = count;
    const u64 own_weight = weight;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const u32 other_count = __shfl_up_sync(~0u, count, d);
        const u64 other_weight = __shfl_up_sync(~0u, weight, d);
        if (lane >= d) count += other_count, weight += other_weight;
    }
    if (lane == 31) shared.warp_count[warp] = count, shared.warp_weight[warp] = weight;
    __syncthreads();
    count += search.above - own_count;
    weight += search.weight_above - own_weight;
    for (int w = 0; w < warp; w++) count += shared.warp_count[w], weight += shared.warp_weight[w];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 count_with = count + counts[i];
        const u64 weight_with = weight + weights[i];
        const bool first = count == 0 || !enough(count, weight);
        if (counts[i] != 0 && first && enough(count_with, weight_with)) {
            shared.bucket = kBuckets - 1 - 2 * t - i;
            shared.inside = counts[i];
            shared.above = count;
            shared.weight_above = weight;
        }
        count = count_with;
        weight = weight_with;
    }
    __syncthreads();
    if (shared.bucket < 0) return false;
    search.prefix = search.prefix << kBits | (u32)shared.bucket;
    search.above = shared.above;
    search.weight_above = shared.weight_above;
    search.ties = shared.inside;
    __syncthreads();
    return true;
}

template <bool kWeights, typename Enough>
DEVICE bool find(Shared& shared, const Row& row, Search& search, Enough enough) {
    search = {};
    return pass<21, 11, kWeights>(shared, row, search, enough) && pass<10, 11, kWeights>(shared, row, search, enough) &&
           pass<0, 10, kWeights>(shared, row, search, enough);
}

// Place of the last of the first `needed` tokens with the logit that was found.
DEVICE u64 last_of(Shared& shared, const Row& row, const Search& search, u32 needed) {
    const u64 all = place_of(search.prefix, ~0);
    if (needed >= search.ties) return row.lower > all ? row.lower : all;
    // Each warp counts in its part of the row.
    const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, width = (row.vocab + 31) / 32;
    const i32 begin = warp * width, end = min(begin + width, row.vocab);
    const auto tied = [&](i32 token) {
        if (token >= end) return false;
        const u32 key = order_of(__ldg(row.logits + token));
        return key == search.prefix && place_of(key, token) >= row.lower;
    };
    u32 count = 0;
#pragma unroll 8
    for (i32 token = begin + lane; token < end; token += 32) count += tied(token);
    count = __reduce_add_sync(~0u, count);
    if (lane == 0) shared.warp_count[warp] = count;
    __syncthreads();
    u32 before = 0;
    for (int w = 0; w < warp; w++) before += shared.warp_count[w];
    if (before < needed && needed <= before + count) {
        for (i32 base = begin;; base += 32) {
            const i32 token = base + lane;
            const u32 ties = __ballot_sync(~0u, tied(token));
            const u32 rank = before + __popc(ties & ((2u << lane) - 1));
            if ((ties >> lane & 1) && rank == needed) shared.bucket = token;
            before += __popc(ties);
            if (before >= needed) break;
        }
    }
    __syncthreads();
    return place_of(search.prefix, shared.bucket);
}

// How many tokens with the logit that was found reach `limit`; at least one.
DEVICE u32 ties_needed(const Row& row, const Search& search, double limit) {
    const u64 weight = row.weight(search.prefix);
    const auto enough = [&](u32 ties) { return (double)(search.weight_above + ties * weight) >= limit; };
    u32 low = 1, high = search.ties;
    while (low < high) {
        const u32 middle = (low + high) / 2;
        if (enough(middle)) high = middle;
        else low = middle + 1;
    }
    return low;
}

// The sum over all threads.
DEVICE u64 sum_of(Shared& shared, u64 x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    if ((threadIdx.x & 31) == 0) shared.warp_weight[threadIdx.x >> 5] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < 32; w++) x += shared.warp_weight[w];
    __syncthreads();
    return x;
}

extern "C" __global__ void __launch_bounds__(kThreads) filter_logits(const __grid_constant__ Params p) {
    __shared__ Shared shared;
    extern __shared__ u64 front[];  // [kFront]
    const i32 index = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float temperature = __ldg(p.temperature + index), top_p = __ldg(p.top_p + index);
    const i32 top_k = __ldg(p.top_k + index);
    if (!(temperature > 0.0f) || top_k == 1 || (top_k <= 0 && top_p >= 1.0f)) {
        if (threadIdx.x == 0) p.cut[index] = temperature > 0.0f && top_k != 1 ? 0 : ~0ull;
        return;
    }
    Row row = {p.logits + (u64)index * p.vocab, p.vocab, 0, 0.0, 1.0 / (double)temperature, nullptr, 0};
    float largest = -infinity();
    each_logit<kLoads>(row.logits, p.vocab, threadIdx.x, kThreads, [&](float logit, i32) {
        largest = logit > largest ? logit : largest;
    });
    // Each pair of threads has a token that reaches the least of their largest logits.
    const u32 order = order_of(largest), of_pair = max(order, __shfl_xor_sync(~0u, order, 1));
    const u32 of_warp = __reduce_max_sync(~0u, order), least_of_warp = __reduce_min_sync(~0u, of_pair);
    if (lane == 0) shared.warp_count[warp] = of_warp, shared.part[0][warp] = least_of_warp;
    if (threadIdx.x == 0) shared.in_front = 0;
    __syncthreads();
    largest = logit_of(__reduce_max_sync(~0u, shared.warp_count[lane]));
    const float least = logit_of(__reduce_min_sync(~0u, shared.part[0][lane]));
    row.largest = (double)largest;
    __syncthreads();
    if (!(largest > -infinity()) || largest == infinity()) {
        if (threadIdx.x == 0) p.cut[index] = ~0ull;
        return;
    }
    const auto keep = [&](float logit, i32 token) {
        if (!(logit >= least)) return;
        const u32 at = atomicAdd(&shared.in_front, 1u);
        if (at < kFront) front[at] = place_of(order_of(logit), token);
    };
    // Whether the front is known, and whole.
    const auto front_is_whole = [&] {
        __syncthreads();
        return least > -infinity() && shared.in_front <= kFront;
    };
    Search search;
    if (top_k > 0) {
        const u32 k = (u32)top_k;
        if (k <= kSurely && least > -infinity()) {
            each_logit<kLoads>(row.logits, p.vocab, threadIdx.x, kThreads, keep);
            if (front_is_whole()) row.front = front, row.in_front = shared.in_front;
        }
        const auto enough = [=](u32 count, u64) { return count >= k; };
        if (find<false>(shared, row, search, enough)) row.lower = last_of(shared, row, search, k - search.above);
        __syncthreads();
    }
    if (top_p < 1.0f) {
        const bool looking = !row.front && top_k <= 0;
        u64 total = 0, above = 0;
        row.each([&](u32 key, i32 token) {
            const u64 weight = row.weight(key);
            const float logit = logit_of(key);
            total += weight;
            if (logit >= least) above += weight;
            if (looking) keep(logit, token);
        });
        total = sum_of(shared, total);
        above = sum_of(shared, above);
        const double limit = (double)top_p * (double)total;
        if (looking && front_is_whole() && (double)above >= limit) row.front = front, row.in_front = shared.in_front;
        const auto enough = [=](u32, u64 weight) { return (double)weight >= limit; };
        if (find<true>(shared, row, search, enough))
            row.lower = last_of(shared, row, search, ties_needed(row, search, limit));
    }
    if (threadIdx.x == 0) p.cut[index] = row.lower;
}
