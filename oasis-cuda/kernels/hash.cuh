// SplitMix64, the hash behind everything that is drawn at random.
#pragma once
#include "prelude.cuh"

constexpr u64 kHashStep = 0x9e3779b97f4a7c15ull;

// The finaliser.
DEVICE u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
