//! Sixteen-lane f32 arithmetic, compiled once per instruction set and chosen at run time.
//!
//! The number of lanes and the order in which they are summed are fixed: a result depends neither on the width of the
//! machine's registers nor on what else is computed in the same call.

use half::bf16;

/// Lanes of every vector, whatever the machine's register width.
pub(super) const LANES: usize = 16;

/// Code to compile once per instruction set. `run` and all it calls must be `#[inline(always)]`.
pub(super) trait Kernel {
    /// What the kernel returns.
    type Output;
    /// Runs with the vectors of `isa`.
    fn run<S: Isa>(self, isa: S) -> Self::Output;
}

/// Runs `kernel` with the best instruction set of this machine.
#[inline]
pub(super) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        use pulp::x86::{V3, V4};
        if let Some(isa) = V4::try_new() {
            return isa.vectorize(
                #[inline(always)]
                || kernel.run(isa),
            );
        }
        if let Some(isa) = V3::try_new() {
            return isa.vectorize(
                #[inline(always)]
                || kernel.run(isa),
            );
        }
    }
    kernel.run(Portable)
}

/// Vectors of [`LANES`] f32 values in one instruction set.
pub(super) trait Isa: Copy {
    /// One vector.
    type V: Copy;
    /// `value` in every lane.
    fn splat(self, value: f32) -> Self::V;
    /// Reads a vector.
    fn load(self, from: &[f32; LANES]) -> Self::V;
    /// Reads and widens a vector; exact.
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::V;
    /// Writes a vector.
    fn store(self, to: &mut [f32; LANES], value: Self::V);
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the machine can.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of each pair of lanes; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Sum of the lanes by halves: 16, 8, 4, 2, 1.
    fn sum(self, a: Self::V) -> f32;
    /// [`sum`](Isa::sum) of each vector, in the lane of its index; the same bits.
    #[inline(always)]
    fn sums(self, vectors: [Self::V; LANES]) -> Self::V {
        let mut sums = [0.0; LANES];
        for (sum, vector) in sums.iter_mut().zip(vectors) {
            *sum = self.sum(vector);
        }
        self.load(&sums)
    }
    /// Largest lane.
    fn peak(self, a: Self::V) -> f32;
}

#[cfg(target_arch = "x86_64")]
mod x86;

/// Plain arrays, for machines without a faster path.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Isa for Portable {
    type V = [f32; LANES];

    #[inline(always)]
    fn splat(self, value: f32) -> Self::V {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        *from
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::V {
        from.map(|value| f32::from_bits(u32::from(value.to_bits()) << 16))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], value: Self::V) {
        *to = value;
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Without the instruction, a fused multiply-add is a library call.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
        } else {
            std::array::from_fn(|i| a[i] * b[i] + c[i])
        }
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn peak(self, a: Self::V) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |max, x| if x > max { x } else { max })
    }

    #[inline(always)]
    fn sum(self, mut a: Self::V) -> f32 {
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                a[i] += a[i + width];
            }
            width /= 2;
        }
        a[0]
    }
}

/// An element that widens to f32 without rounding.
pub(super) trait Element: Copy + Send + Sync + 'static {
    /// Zero.
    const ZERO: Self;
    /// Reads and widens a vector.
    fn load<S: Isa>(isa: S, from: &[Self; LANES]) -> S::V;
}

impl Element for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn load<S: Isa>(isa: S, from: &[Self; LANES]) -> S::V {
        isa.load(from)
    }
}

impl Element for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn load<S: Isa>(isa: S, from: &[Self; LANES]) -> S::V {
        isa.load_bf16(from)
    }
}

/// Reads up to [`LANES`] elements; the missing lanes are 0.
#[inline(always)]
pub(super) fn load_part<T: Element, S: Isa>(isa: S, from: &[T]) -> S::V {
    let mut padded = [T::ZERO; LANES];
    padded[..from.len()].copy_from_slice(from);
    T::load(isa, &padded)
}

/// Largest of `values`; negative infinity when there are none.
#[inline(always)]
pub(super) fn max<S: Isa>(isa: S, values: &[f32]) -> f32 {
    let (vectors, tail) = values.as_chunks::<LANES>();
    let mut lanes = isa.splat(f32::NEG_INFINITY);
    for vector in vectors {
        lanes = isa.max(isa.load(vector), lanes);
    }
    tail.iter().fold(isa.peak(lanes), |max, &x| if x > max { x } else { max })
}

/// Sum of `values`, in lanes.
#[inline(always)]
pub(super) fn sum<S: Isa>(isa: S, values: &[f32]) -> f32 {
    let (vectors, tail) = values.as_chunks::<LANES>();
    let mut lanes = isa.splat(0.0);
    for vector in vectors {
        lanes = isa.add(lanes, isa.load(vector));
    }
    isa.sum(isa.add(lanes, load_part(isa, tail)))
}

/// Sum of the squares of `values`, in lanes.
#[inline(always)]
pub(super) fn sum_of_squares<S: Isa>(isa: S, values: &[f32]) -> f32 {
    let (vectors, tail) = values.as_chunks::<LANES>();
    let mut lanes = isa.splat(0.0);
    for vector in vectors {
        let vector = isa.load(vector);
        lanes = isa.mul_add(vector, vector, lanes);
    }
    let tail: S::V = load_part(isa, tail);
    isa.sum(isa.mul_add(tail, tail, lanes))
}

/// `e^x`, within 1.5 units in the last place; 0 below -87.33 (the smallest normal result), infinity above 88.72, NaN
/// for NaN. Branch-free, so loops over it are vectorised.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x < -88.0 { -88.0 } else { x };
    let clamped = if clamped > 89.0 { 89.0 } else { clamped };
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.987_569_1e-4;
    p = f32::mul_add(p, r, 1.398_2e-3);
    p = f32::mul_add(p, r, 8.333_452e-3);
    p = f32::mul_add(p, r, 4.166_579_6e-2);
    p = f32::mul_add(p, r, 0.166_666_66);
    p = f32::mul_add(p, r, 0.5);
    let e = f32::mul_add(p * r, r, r) + 1.0;
    // 2^n in two factors: n reaches 128, beyond the largest exponent.
    let k = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = k >> 1;
    let first = f32::from_bits(((half + 127) as u32) << 23);
    let second = f32::from_bits(((k - half + 127) as u32) << 23);
    let value = e * first * second;
    if x < -87.336_54 { 0.0 } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_whole_range() {
        let mut worst = 0.0f64;
        let mut x = -87.33f32;
        while x < 88.72 {
            let exact = f64::from(x).exp();
            let got = f64::from(exp(x));
            let ulp = exact * f64::from(f32::EPSILON);
            worst = worst.max((got - exact).abs() / ulp);
            x += 0.000_37;
        }
        assert!(worst < 1.5, "worst error {worst} ulp");
    }

    #[test]
    fn exp_of_special_values() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::MIN), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.5), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    /// Checks one instruction set against plain arithmetic on values whose sums are exact.
    struct Check;

    impl Kernel for Check {
        type Output = ();

        #[inline(always)]
        fn run<S: Isa>(self, isa: S) {
            let lanes: [f32; LANES] = std::array::from_fn(|i| (1 << i) as f32);
            let halves = lanes.map(bf16::from_f32);
            let a = isa.load(&lanes);
            assert_eq!(isa.sum(a), 65_535.0);
            assert_eq!(isa.sum(isa.load_bf16(&halves)), 65_535.0);
            assert_eq!(isa.sum(isa.mul(isa.add(a, a), isa.splat(0.5))), 65_535.0);
            assert_eq!(isa.sum(isa.mul_add(a, isa.splat(2.0), a)), 3.0 * 65_535.0);
            let mut back = [0.0; LANES];
            isa.store(&mut back, load_part(isa, &lanes[..5]));
            assert_eq!(back[..6], [1.0, 2.0, 4.0, 8.0, 16.0, 0.0]);
            assert_eq!(isa.peak(isa.max(a, isa.splat(7.0))), 32_768.0);
            let mut vectors = [isa.splat(0.0); LANES];
            let mut expected = [0.0; LANES];
            for (i, (vector, sum)) in vectors.iter_mut().zip(&mut expected).enumerate() {
                let values: [f32; LANES] = std::array::from_fn(|lane| 1.0 / (3 * i + 5 * lane + 1) as f32);
                *vector = isa.load(&values);
                *sum = isa.sum(*vector);
                assert_eq!(*sum, Portable.sum(values));
            }
            isa.store(&mut back, isa.sums(vectors));
            assert_eq!(back, expected);
            for len in 0..40 {
                let values: Vec<f32> = (0..len).map(|i| -((i as f32) - 7.0).abs()).collect();
                assert_eq!(max(isa, &values), values.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                assert_eq!(sum(isa, &values), values.iter().sum::<f32>());
                assert_eq!(sum_of_squares(isa, &values), values.iter().map(|x| x * x).sum::<f32>());
            }
        }
    }

    #[test]
    fn every_instruction_set_computes_the_same() {
        dispatch(Check);
        Check.run(Portable);
        #[cfg(target_arch = "x86_64")]
        if let Some(isa) = pulp::x86::V3::try_new() {
            isa.vectorize(|| Check.run(isa));
        }
    }
}
