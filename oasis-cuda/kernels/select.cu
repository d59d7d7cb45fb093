// Top-K and capped admission, one CTA a (request, KV head), by exactly the rules of oasis-core:
// - wanted are the `slots` best blocks: kept ones at both ends of the context, then larger scores, ties to the lower
//   block, NaN last, -0 equal to 0;
// - a working set that is empty is filled by rank and without a cap;
// - wanted residents are touched; a block that has just been completed takes the slot of the least recently wanted other
//   block, or a free one, unless it is unwanted and there is none;
// - the `cap` best misses take the slots of the first victims: free ones by slot, then by the policy's key. Where the
//   policy has `gains`, misses are admitted for free slots and from then on up to the first one without a gain.
//
// -D SELECTOR="file" HEAD_DIM=64|128 THREADS=256..1024 ITEMS=n, at most THREADS * ITEMS blocks; FOLLOWS_LINK=0|1: the cap
// is a value in memory, which follows the link
#include "layout.cuh"
#include "optional.cuh"
#include "transfer.cuh"
#include SELECTOR

constexpr int kWarps = THREADS / 32;
constexpr int kWords = kWarps * ITEMS;
template <class S, class = void> constexpr bool kHasGains = false;
template <class S> constexpr bool kHasGains<S, typename Exists<decltype(&S::gains)>::type> = true;
template <class S, class = void> constexpr bool kHasTimes = false;
template <class S> constexpr bool kHasTimes<S, typename Exists<decltype(S::victim(0u, 0.0f, 0u, 0u))>::type> = true;
constexpr bool kGains = kHasGains<Selector>, kTimes = kHasTimes<Selector>;

struct Params {
    const float* scores;    // [requests][kv_heads][stride]
    const i32* position;    // [requests] position of the newest token; -1 for padding
    i32* slot_block;        // [requests][kv_heads][slots]; negative is free
    u32* last_selected;     // [requests][kv_heads][slots]
    u32* times_selected;    // [requests][kv_heads][slots]; only for selectors that ask for it
    const u64* host;        // [requests] entries [blocks][kv_heads] of this layer in mapped host memory
    u8* entries;            // [requests][kv_heads][slots] entries
    const u8* tail;         // [requests][kv_heads][2] entries; block b lies at b % 2
    CopyList* list;
    EntryCopy* copies;           // [requests * kv_heads * (slots + 2)]
    const u32* step;        // [1] this step, counted from 1
    i32 kv_heads, stride, slots, cap;
    i32 sinks, recent;      // first and last blocks that are kept, at most `slots` each
    const u32* link_cap;    // [1] where FOLLOWS_LINK: takes the place of `cap`
    LinkStamps* stamps;     // where FOLLOWS_LINK: null for selections that do not count
};

// Scores of one head's blocks as they are ranked: those of kept blocks are infinite, and no other is.
struct Scores {
    const float* scores;
    i32 first, last;  // blocks that are not kept
    bool any_kept;

    DEVICE Scores(const Params& p, const float* scores, i32 blocks) : scores(scores) {
        first = min(p.sinks, blocks);
        const i32 recent = min(p.recent, min(p.slots, blocks) - first);
        last = blocks - recent;
        any_kept = first + recent > 0;
    }
    DEVICE float ranked(float score, i32 block) const {
        const float infinity = __uint_as_float(0x7f800000u);
        if (block < first || block >= last) return infinity;
        return any_kept && score == infinity ? __uint_as_float(0x7f7fffffu) : score;
    }
    DEVICE float operator[](i32 block) const { return ranked(__ldg(scores + block), block); }
};

// Larger means more wanted.
DEVICE u32 order_key(float score) {
    const u32 bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return score != score ? 0u : (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}
// The score of a key that is not NaN's.
DEVICE float score_of(u32 key) { return __uint_as_float((key & 0x80000000u) ? key ^ 0x80000000u : ~key); }

struct Shared {
    u32 wanted[kWords];  // bit per block; once residents are found, the misses
    u32 ties[kWords];
    u32 histogram[256];
    u32 warp_low[kWarps], warp_high[kWarps];
    u32 prefix, need, found;
    i32 misses, victims, residents, promoted, free;
    i32 limit;           // misses that are admissible
    u32 best, worst;     // keys of finite wanted scores
    u32 first_copy;
};

// Smallest key that is wanted and how many of those equal to it are (all where `need` is `found`).
struct Threshold {
    u32 key, need, found;
};

// Radix search for the `wanted`-th largest of the CTA's keys, from the first bit in which any two differ.
DEVICE Threshold find_threshold(Shared& s, const u32 (&key)[ITEMS], i32 n, u32 wanted) {
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    u32 low = ~0u, high = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; j++)
        if (j * THREADS + t < n) {
            low = min(low, key[j]);
            high = max(high, key[j]);
        }
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    if (lane == 0) {
        s.warp_low[warp] = low;
        s.warp_high[warp] = high;
    }
    for (int i = t; i < 256; i += THREADS) s.histogram[i] = 0;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
        low = min(low, s.warp_low[w]);
        high = max(high, s.warp_high[w]);
    }
    if (low == high) return {low, wanted, (u32)n};

    int shift = 32 - __clz(low ^ high);  // bits below the common prefix
    u32 prefix = shift == 32 ? 0 : high >> shift, need = wanted, found = n;
    while (true) {
        const int next = max(shift - 8, 0);
        const u32 digits = (1u << (shift - next)) - 1;
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            const bool candidate = j * THREADS + t < n && (shift == 32 || key[j] >> shift == prefix);
            if (candidate) atomicAdd(&s.histogram[(key[j] >> next) & digits], 1u);
        }
        __syncthreads();
        u32 count = 0, sum = 0;
        if (t < 256) {
            count = sum = s.histogram[255 - t];
            s.histogram[255 - t] = 0;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                const u32 other = __shfl_up_sync(~0u, sum, d);
                if (lane >= d) sum += other;
            }
            if (lane == 31) s.warp_low[warp] = sum;
        }
        __syncthreads();
        if (t < 256) {
            for (int w = 0; w < warp; w++) sum += s.warp_low[w];
            if (sum - count < need && sum >= need) {
                s.prefix = prefix << (shift - next) | (255 - t);
                s.need = need - (sum - count);
                s.found = count;
            }
        }
        __syncthreads();
        prefix = s.prefix;
        need = s.need;
        found = s.found;
        shift = next;
        if (need == found || shift == 0) return {prefix << shift, need, found};
    }
}

// Marks the wanted blocks.
DEVICE void mark_wanted(Shared& s, const u32 (&key)[ITEMS], i32 n, u32 wanted) {
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    if (n <= wanted) {
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            const u32 word = __ballot_sync(~0u, j * THREADS + t < n);
            if (lane == 0) s.wanted[j * kWarps + warp] = word;
        }
        return;
    }
    const Threshold threshold = find_threshold(s, key, n, wanted);
    const bool all_ties = threshold.need == threshold.found;
#pragma unroll
    for (int j = 0; j < ITEMS; j++) {
        const bool real = j * THREADS + t < n;
        const u32 above = __ballot_sync(~0u, real && (all_ties ? key[j] >= threshold.key : key[j] > threshold.key));
        const u32 equal = __ballot_sync(~0u, real && key[j] == threshold.key);
        if (lane == 0) {
            s.wanted[j * kWarps + warp] = above;
            s.ties[j * kWarps + warp] = equal;
        }
    }
    if (all_ties) return;
    __syncthreads();
    if (warp != 0) return;
    // The first `need` of the ties, in the order of blocks.
    u32 before = 0;
    for (int base = 0; base < kWords; base += 32) {
        u32 word = base + lane < kWords ? s.ties[base + lane] : 0, sum = __popc(word);
        const u32 count = sum;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const u32 other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        u32 taken = before + sum - count, bits = 0;
        for (; word != 0 && taken < threshold.need; taken++) {
            bits |= word & -word;
            word &= word - 1;
        }
        if (bits) s.wanted[base + lane] |= bits;
        before += __shfl_sync(~0u, sum, 31);
    }
}

// Something to be ranked: smaller keys first, equal ones by `id`.
struct Ranked {
    u64 key;
    i32 id;
    u32 last;  // of a victim: the step that last wanted its block

    DEVICE bool before(const Ranked& other) const { return key < other.key || (key == other.key && id < other.id); }
};

// How many of `items` come before `items[i]`.
DEVICE i32 rank_of(const Ranked* items, i32 count, i32 i) {
    const Ranked item = items[i];
    i32 rank = 0;
#pragma unroll 4
    for (i32 j = 0; j < count; j++) rank += items[j].before(item);
    return rank;
}

// Finds the largest and smallest finite scores that are wanted.
DEVICE void find_range(Shared& s, const u32 (&key)[ITEMS]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 above = order_key(__uint_as_float(0x7f800000u)), below = order_key(__uint_as_float(0xff800000u));
    u32 best = 0, worst = ~0u;
#pragma unroll
    for (int j = 0; j < ITEMS; j++) {
        if (!(s.wanted[j * kWarps + warp] >> lane & 1) || key[j] <= below || key[j] >= above) continue;
        best = max(best, key[j]);
        worst = min(worst, key[j]);
    }
    best = __reduce_max_sync(~0u, best);
    worst = __reduce_min_sync(~0u, worst);
    if (lane == 0 && best != 0) {
        atomicMax(&s.best, best);
        atomicMin(&s.worst, worst);
    }
}

// Whether the policy lets a miss push a resident out.
template <class S> DEVICE bool is_gain(const Shared& s, float score) {
    if constexpr (kHasGains<S>) {
        const float least = __uint_as_float(0xff800000u);
        return S::gains(score, s.best ? score_of(s.best) : least, s.best ? score_of(s.worst) : least);
    }
    return true;
}

// The policy's order of victims that hold a block, free slots before all of them.
template <class S> DEVICE u64 victim_key(u32 last, float score, i32 slot, u32 times) {
    u64 key;
    if constexpr (kHasTimes<S>) key = S::victim(last, score, (u32)slot, times);
    else key = S::victim(last, score, (u32)slot);
    return min(key, ~0ull - 1) + 1;
}

// Sorts blocks that are resident from those that are misses; touches the former, lists free slots and slots of unwanted
// blocks as victims.
DEVICE void match_residents(const Params& p, Shared& s, Ranked* victims, const Scores& scores, i32 pair, u32 step,
                            i32 own_block, u32 own_last) {
    const int t = threadIdx.x, lane = t & 31;
    for (i32 base = 0; base < p.slots; base += THREADS) {
        const i32 slot = base + t;
        const u64 place = (u64)pair * p.slots + slot;
        const bool real = slot < p.slots;
        const i32 block = !real ? -1 : base == 0 ? own_block : p.slot_block[place];
        const u32 bit = 1u << (block & 31);
        const bool wanted = block >= 0 && (s.wanted[block >> 5] & bit);
        if (wanted) {
            atomicAnd(&s.wanted[block >> 5], ~bit);
            p.last_selected[place] = step;
            if constexpr (kTimes) {
                const u32 times = p.times_selected[place];
                p.times_selected[place] = times + (times != ~0u);
            }
        }
        const u32 mask = __ballot_sync(~0u, real && !wanted);
        const bool any_resident = __any_sync(~0u, block >= 0);
        i32 at = 0;
        if constexpr (kGains) {
            const u32 free = __ballot_sync(~0u, real && block < 0);
            if (lane == 0 && free) atomicAdd(&s.free, __popc(free));
        }
        if (lane == 0) {
            if (any_resident) s.residents = 1;
            if (mask) at = atomicAdd(&s.victims, __popc(mask));
        }
        at = __shfl_sync(~0u, at, 0) + __popc(mask & ((1u << lane) - 1));
        if (real && !wanted) {
            u64 key = 0;  // free slots leave first, by slot
            u32 last = 0;
            if (block >= 0) {
                last = base == 0 ? own_last : p.last_selected[place];
                key = victim_key<Selector>(last, scores[block], slot, kTimes ? p.times_selected[place] : 0);
            }
            victims[at] = {key, slot, last};
        }
    }
}

// Gives the block that has just been completed a free slot or that of the least recently wanted victim, whatever the
// policy's order; warp 0 alone.
DEVICE void promote(const Params& p, Shared& s, Ranked* victims, const Scores& scores, i32 pair, u32 step,
                    i32 completed) {
    const int lane = threadIdx.x & 31;
    if (s.victims == 0) return;
    auto order = [&](i32 i) { return (victims[i].key ? victims[i].last + 1ull : 0ull) << 32 | (u32)victims[i].id; };
    i32 first = 0;
    u64 least = order(0);
    for (i32 i = lane; i < s.victims; i += 32)
        if (order(i) < least) {
            first = i;
            least = order(i);
        }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const i32 other = __shfl_xor_sync(~0u, first, d);
        const u64 others = __shfl_xor_sync(~0u, least, d);
        if (others < least) {
            first = other;
            least = others;
        }
    }
    __syncwarp();  // all lanes have read what is changed below
    if (lane != 0) return;
    const i32 slot = victims[first].id;
    const u64 place = (u64)pair * p.slots + slot;
    const u32 bit = 1u << (completed & 31);
    s.promoted = slot;
    if (victims[first].key == 0) s.free--;
    p.slot_block[place] = completed;
    p.last_selected[place] = step;
    if constexpr (kTimes) p.times_selected[place] = 1;
    if (s.wanted[completed >> 5] & bit) {
        s.wanted[completed >> 5] &= ~bit;
        victims[first] = victims[--s.victims];
    } else {
        victims[first].key = victim_key<Selector>(step, scores[completed], slot, 1);
    }
}

// Lists the blocks that are wanted and not resident.
DEVICE void list_misses(Shared& s, Ranked* misses, const Scores& scores) {
    for (int i = threadIdx.x; i < kWords; i += THREADS) {
        u32 word = s.wanted[i];
        if (word == 0) continue;
        i32 at = atomicAdd(&s.misses, __popc(word));
        for (; word != 0; word &= word - 1, at++) {
            const i32 block = i * 32 + __ffs(word) - 1;
            misses[at] = {~Selector::admit(scores[block], (u32)block), block, 0};
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) select_blocks(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) Ranked arrays[];
    __shared__ Shared s;
    Ranked* const victims = arrays;             // [slots]
    Ranked* const misses = arrays + p.slots;    // [slots]
    i32* const victim = reinterpret_cast<i32*>(misses + p.slots);  // [slots] slot by rank
    i32* const admitted = victim + p.slots;     // [slots] block by rank

    const int t = threadIdx.x;
    const i32 head = blockIdx.x, request = blockIdx.y, pair = request * p.kv_heads + head;
    // All loads before the first wait: what lies beyond the last block is loaded and ignored.
    const i32 position = __ldg(p.position + request);
    const u32 step = __ldg(p.step);
    const float* row = p.scores + (u64)pair * p.stride;
    float score[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; j++) score[j] = j * THREADS + t < p.stride ? __ldg(row + j * THREADS + t) : 0.0f;
    const i32 own_block = t < p.slots ? p.slot_block[(u64)pair * p.slots + t] : -1;
    const u32 own_last = t < p.slots ? p.last_selected[(u64)pair * p.slots + t] : 0;
    const u64 host = __ldg(p.host + request);
    const i32 cap = FOLLOWS_LINK ? (i32)__ldg(p.link_cap) : p.cap;
    if (FOLLOWS_LINK && pair == 0 && t == 0 && p.stamps != nullptr) p.stamps->selected = device_time();
    const i32 n = (position + 1) / kBlock, completed = (position + 1) % kBlock == 0 ? n - 1 : -1;
    if (n == 0) return;

    const Scores scores(p, row, n);
    u32 key[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; j++) key[j] = order_key(scores.ranked(score[j], j * THREADS + t));
    if (t == 0) {
        s.misses = s.victims = s.residents = s.free = 0;
        s.promoted = -1;
        s.best = 0;
        s.worst = ~0u;
    }
    mark_wanted(s, key, n, p.slots);
    __syncthreads();
    if constexpr (kGains) {
        find_range(s, key);
        __syncthreads();
    }
    match_residents(p, s, victims, scores, pair, step, own_block, own_last);
    __syncthreads();
    const bool fill = s.residents == 0;
    if (completed >= 0 && !fill) {
        if (t < 32) promote(p, s, victims, scores, pair, step, completed);
        __syncthreads();
    }
    list_misses(s, misses, scores);
    __syncthreads();

    const i32 candidates = s.misses, places = s.victims;
    i32 pairs = min(min(candidates, places), fill ? p.slots : cap);
    if (kGains && t == 0) s.limit = pairs;
    if constexpr (kGains) __syncthreads();
    if (pairs > 0) {
        for (i32 i = t; i < places; i += THREADS) victim[rank_of(victims, places, i)] = victims[i].id;
        // From the last thread down, so that both rankings run side by side.
        for (i32 i = THREADS - 1 - t; i < candidates; i += THREADS) {
            const i32 rank = rank_of(misses, candidates, i);
            admitted[rank] = misses[i].id;
            if (kGains && rank >= s.free && rank < pairs && !is_gain<Selector>(s, scores[misses[i].id]))
                atomicMin(&s.limit, rank);
        }
    }
    if constexpr (kGains) {
        __syncthreads();
        pairs = s.limit;
    }
    if (t == 0) {
        const u32 copies = (u32)pairs + (completed >= 0 ? 2u : 0u);
        if (copies > 0) s.first_copy = atomicAdd(&p.list->count, copies);
        if (pairs > 0) atomicAdd(fill ? &p.list->filled : &p.list->admitted, (u64)pairs);
        if (candidates > pairs) atomicAdd(&p.list->deferred, (u64)(candidates - pairs));
    }
    __syncthreads();

    auto slot_entry = [&](i32 slot) { return (u64)(p.entries + ((u64)pair * p.slots + slot) * kEntryBytes); };
    const u64 completed_entry = (u64)(p.tail + ((u64)pair * 2 + (completed & 1)) * kEntryBytes);
    auto host_entry = [&](i32 block) { return host + ((u64)block * p.kv_heads + head) * kEntryBytes; };
    EntryCopy* const copies = p.copies + s.first_copy;
    for (i32 i = t; i < pairs; i += THREADS) {
        const i32 block = admitted[i], slot = victim[i];
        p.slot_block[(u64)pair * p.slots + slot] = block;
        p.last_selected[(u64)pair * p.slots + slot] = step;
        if constexpr (kTimes) p.times_selected[(u64)pair * p.slots + slot] = 1;
        // What has just been completed is on its way to the host in this very list: take it from the tail.
        copies[i] = {block == completed ? completed_entry : host_entry(block), slot_entry(slot)};
    }
    if (completed >= 0 && t == 0) {
        i32 promoted = s.promoted;
        for (i32 i = 0; i < pairs; i++)
            if (victim[i] == promoted) promoted = -1;
        copies[pairs] = {completed_entry, host_entry(completed)};
        copies[pairs + 1] = promoted < 0 ? EntryCopy{0, 0} : EntryCopy{completed_entry, slot_entry(promoted)};
    }
}
