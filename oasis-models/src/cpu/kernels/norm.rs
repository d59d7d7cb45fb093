//! Root-mean-square normalisation.

use std::ops::Range;

use super::simd::{Isa, Kernel, dispatch, sum_of_squares};

/// RMSNorm of every row: `out = x / sqrt(mean(x²) + eps) * weight`.
///
/// - `weight` `[dim]`
/// - `x`, `out` `[rows][dim]`
///
/// # Panics
/// When a slice's length does not match the shapes above.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "rms_norm: x and out differ in length");
    out.copy_from_slice(x);
    rms_norm_in_place(out, weight, eps);
}

/// [`rms_norm`] of `x` `[rows][dim]` onto itself.
///
/// # Panics
/// When `x` is not a whole number of rows.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    rms_norm_heads(x, weight.len(), 0..1, weight, eps);
}

/// RMSNorm of some heads of every row, each on its own (Qwen3's query and key norms).
///
/// - `x` `[rows][row_len]`; of each row, heads `heads` of `head_dim` elements are normalised and the rest is left alone
/// - `weight` `[head_dim]`, shared by the heads
///
/// # Panics
/// When `x` is not a whole number of rows or the heads do not lie within one.
pub fn rms_norm_heads(x: &mut [f32], row_len: usize, heads: Range<usize>, weight: &[f32], eps: f32) {
    assert!(!weight.is_empty() && heads.end * weight.len() <= row_len, "rms_norm: heads do not fit in a row");
    assert_eq!(x.len() % row_len, 0, "rms_norm: x is not [rows][{row_len}]");
    dispatch(Norm { x, row_len, heads, weight, eps });
}

/// One call of [`rms_norm_heads`].
struct Norm<'a> {
    x: &'a mut [f32],
    row_len: usize,
    heads: Range<usize>,
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let dim = self.weight.len();
        for row in self.x.chunks_exact_mut(self.row_len) {
            for head in row[self.heads.start * dim..self.heads.end * dim].chunks_exact_mut(dim) {
                let scale = 1.0 / (sum_of_squares(isa, head) / dim as f32 + self.eps).sqrt();
                for (x, weight) in head.iter_mut().zip(self.weight) {
                    *x = *x * scale * weight;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, noise};
    use super::*;

    fn reference(x: &[f32], weight: &[f32], eps: f64) -> Vec<f64> {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + eps).sqrt();
        x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * scale * f64::from(w)).collect()
    }

    #[test]
    fn matches_double_precision_and_rows_do_not_influence_each_other() {
        for dim in [1, 15, 16, 64, 80, 576] {
            let (x, weight) = (noise(3 * dim, 1), noise(dim, 2));
            let mut together = vec![0.0; 3 * dim];
            rms_norm(&x, &weight, 1e-5, &mut together);
            for (x, row) in x.chunks(dim).zip(together.chunks(dim)) {
                assert_close(row, &reference(x, &weight, 1e-5), 2e-6);
                let mut alone = x.to_vec();
                rms_norm_in_place(&mut alone, &weight, 1e-5);
                assert_eq!(alone, row);
            }
        }
    }

    #[test]
    fn only_the_named_heads_change() {
        let (dim, row_len) = (8, 40);
        let (before, weight) = (noise(2 * row_len, 1), noise(dim, 2));
        let mut x = before.clone();
        rms_norm_heads(&mut x, row_len, 1..3, &weight, 1e-6);
        for (after, before) in x.chunks(row_len).zip(before.chunks(row_len)) {
            assert_eq!(after[..dim], before[..dim]);
            assert_eq!(after[3 * dim..], before[3 * dim..]);
            for head in 1..3 {
                let at = head * dim..(head + 1) * dim;
                assert_close(&after[at.clone()], &reference(&before[at], &weight, 1e-6), 2e-6);
            }
        }
    }
}
