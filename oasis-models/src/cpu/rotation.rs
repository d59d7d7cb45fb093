//! Rotary position embedding applied to rows.

use super::kernels::rotate;
use crate::rope::RotaryEmbedding;

/// Cosines and sines of the positions of some rows.
#[derive(Debug, Clone)]
pub struct Rotation {
    /// Half of `head_dim`.
    half: usize,
    /// `[rows][half]`.
    cos: Vec<f32>,
    /// `[rows][half]`.
    sin: Vec<f32>,
}

impl Rotation {
    /// Rotations of some positions: computed once a forward pass and applied in every layer. Takes
    /// `positions * head_dim * 4` bytes.
    pub fn at(rope: &RotaryEmbedding, positions: impl IntoIterator<Item = usize>) -> Self {
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in positions {
            for [c, s] in rope.angles(position) {
                cos.push(c);
                sin.push(s);
            }
        }
        Self { half: rope.pairs(), cos, sin }
    }

    /// Rotates the first `heads` heads of every row of `x` `[rows][row_len]`, one row a position; the rest of a row (the
    /// values of a fused projection) is left alone.
    ///
    /// # Panics
    /// When `x` does not have one row a position, or the heads do not fit in a row.
    pub fn apply(&self, x: &mut [f32], row_len: usize, heads: usize) {
        assert!(heads * 2 * self.half <= row_len, "rotation: {heads} heads do not fit in a row of {row_len}");
        assert_eq!(x.len() * self.half, self.cos.len() * row_len, "rotation: x is not [positions][{row_len}]");
        let angles = self.cos.chunks_exact(self.half).zip(self.sin.chunks_exact(self.half));
        for (row, (cos, sin)) in x.chunks_exact_mut(row_len).zip(angles) {
            rotate(&mut row[..heads * 2 * self.half], cos, sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernels::testing::{assert_close, noise};
    use super::*;
    use crate::spec::{RopeScaling, RopeSpec};

    #[test]
    fn rotates_halves_and_leaves_the_rest_of_the_row() {
        let (head_dim, heads, row_len) = (8, 2, 20);
        let positions = [3, 4017, 0];
        let before = noise(positions.len() * row_len, 1);
        let mut x = before.clone();
        let rope = RotaryEmbedding::new(&RopeSpec { theta: 10_000.0, scaling: RopeScaling::None }, head_dim);
        Rotation::at(&rope, positions).apply(&mut x, row_len, heads);
        let half = head_dim / 2;
        for (row, position) in positions.into_iter().enumerate() {
            let at = |i: usize| f64::from(before[row * row_len + i]);
            let expected: Vec<f64> = (0..row_len)
                .map(|i| {
                    if i >= heads * head_dim {
                        return at(i);
                    }
                    let pair = i % half;
                    let angle = position as f64 * 10_000f64.powf(-2.0 * pair as f64 / head_dim as f64);
                    if i % head_dim < half {
                        at(i) * angle.cos() - at(i + half) * angle.sin()
                    } else {
                        at(i) * angle.cos() + at(i - half) * angle.sin()
                    }
                })
                .collect();
            assert_close(&x[row * row_len..][..row_len], &expected, 3e-4);
        }
        assert_eq!(x[2 * row_len..], before[2 * row_len..]);
    }
}
