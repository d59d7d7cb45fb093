//! Rotation of head halves by given angles.

use super::simd::{Isa, Kernel, dispatch};

/// Rotates every head of `x` `[heads][2][half]` in place: `(a, b) = (a cos - b sin, b cos + a sin)`, with `cos` and `sin`
/// `[half]`.
pub(in crate::cpu) fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    dispatch(Rotate { x, cos, sin });
}

/// One call of [`rotate`].
struct Rotate<'a> {
    x: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, _: S) {
        let half = self.cos.len();
        for head in self.x.chunks_exact_mut(2 * half) {
            let (low, high) = head.split_at_mut(half);
            for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(self.cos.iter().zip(self.sin)) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}
