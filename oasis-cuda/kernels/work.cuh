// Work of uneven requests, cut into equal parts: units (entries, tiles) of all (request, KV head) in one line.
#pragma once
#include "prelude.cuh"

// The first units of the requests, held by the lanes of a warp: one wait for memory, not one a step of a search.
struct Starts {
    static constexpr int kHeld = 4;
    const i32* start;
    i32 requests, total;  // `total` units of one KV head
    i32 held[kHeld];

    DEVICE Starts(const i32* start, i32 requests) : start(start), requests(requests) {
        const i32 lane = threadIdx.x & 31;
        total = __ldg(start + requests);
#pragma unroll
        for (int i = 0; i < kHeld; i++) held[i] = i * 32 + lane < requests ? __ldg(start + i * 32 + lane) : 0;
    }
    // Requests that start at or before `unit`.
    DEVICE i32 at_or_before(i32 unit, i32 kv_heads) const {
        const i32 lane = threadIdx.x & 31;
        i32 count = 0;
#pragma unroll
        for (int i = 0; i < kHeld; i++)
            count += __popc(__ballot_sync(~0u, i * 32 + lane < requests && held[i] * kv_heads <= unit));
        for (i32 base = kHeld * 32; base < requests; base += 32)
            count += __popc(
                __ballot_sync(~0u, base + lane < requests && __ldg(start + base + lane) * kv_heads <= unit));
        return count;
    }
};

// A place in the line: unit `at` is number `at - head_begin` of KV head `head` of request `request`.
struct Cursor {
    const i32* start;  // [requests + 1] units of one KV head before each request
    i32 kv_heads;
    i32 at, request, head, head_begin, head_end;

    // Places the cursor on unit `unit`, which exists. All lanes of a warp call it together.
    DEVICE Cursor(const Starts& starts, i32 kv_heads, i32 unit) : start(starts.start), kv_heads(kv_heads), at(unit) {
        request = starts.at_or_before(unit, kv_heads) - 1;
        const i32 first = __ldg(start + request), units = __ldg(start + request + 1) - first;
        head = (unit - first * kv_heads) / units;
        head_begin = first * kv_heads + head * units;
        head_end = head_begin + units;
    }
    DEVICE i32 units() const { return head_end - head_begin; }
    DEVICE i32 index() const { return at - head_begin; }
    DEVICE i32 pair() const { return request * kv_heads + head; }

    // Moves `by` units on, to one that exists.
    DEVICE void advance(i32 by) {
        at += by;
        while (at >= head_end) {
            i32 units = head_end - head_begin;
            if (++head == kv_heads) {
                head = 0;
                do {
                    request++;
                    units = __ldg(start + request + 1) - __ldg(start + request);
                } while (units == 0);
            }
            head_begin = head_end;
            head_end += units;
        }
    }
};

// `total` units in `parts` runs of nearly equal length, none empty where there are enough units; in 32 bits throughout.
struct Parts {
    i32 shorter, longer;  // units of a short part; how many parts, the first ones, have one more

    DEVICE Parts(i32 total, i32 parts) : shorter(total / parts), longer(total % parts) {}
    DEVICE i32 begin(i32 part) const { return part * shorter + min(part, longer); }
    // The part that holds `unit`.
    DEVICE i32 of(i32 unit) const {
        const i32 in_longer = longer * (shorter + 1);
        return unit < in_longer ? unit / (shorter + 1) : longer + (unit - in_longer) / shorter;
    }
};
