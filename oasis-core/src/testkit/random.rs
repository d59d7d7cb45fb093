//! Seeded random cases.

use quickcheck::{Arbitrary, Gen};

/// How many cases a test of garbage input runs: `OASIS_FUZZ_CASES` where it is set, else `default`.
pub fn fuzz_cases(default: u64) -> u64 {
    std::env::var("OASIS_FUZZ_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Runs a property on the seeds below `cases`. The seed of a case that panics is printed.
pub fn for_all(cases: u64, mut property: impl FnMut(&mut Random)) {
    struct Seed(u64);
    impl Drop for Seed {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("the case with seed {} failed", self.0);
            }
        }
    }
    for seed in 0..cases {
        let seed = Seed(seed);
        property(&mut Random::new(seed.0));
    }
}

/// Seeded random values.
pub struct Random(Gen);

impl Random {
    /// Values that depend on nothing but `seed`.
    pub fn new(seed: u64) -> Self {
        Self(Gen::from_size_and_seed(64, seed))
    }

    /// An arbitrary value.
    pub fn any<T: Arbitrary>(&mut self) -> T {
        T::arbitrary(&mut self.0)
    }

    /// A number below `bound`, which is at least 1.
    pub fn below(&mut self, bound: usize) -> usize {
        self.any::<u32>() as usize % bound
    }

    /// A number from `low` to `high`, both possible.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of `values`, which are not empty.
    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// A number from -1 to 1.
    pub fn float(&mut self) -> f32 {
        f32::from(self.any::<i16>()) / 32768.0
    }

    /// Numbers from -1 to 1.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// Puts `values` into a random order.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            values.swap(i, self.below(i + 1));
        }
    }
}
