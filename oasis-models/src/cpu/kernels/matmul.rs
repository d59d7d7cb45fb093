//! Linear layers of prefill: many input rows, through faer's matrix product.

use faer::linalg::matmul::matmul as product;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::simd::{Element, Isa, Kernel, LANES, dispatch, load_part};
use crate::weights::{Matrix, MatrixData};

/// Weights of a matrix as f32 `[rows][cols]`: borrowed when stored so, widened (exactly) into `scratch` otherwise.
///
/// One widening serves all chunks of a prefill that runs layer by layer; `scratch` keeps its allocation.
pub fn widen<'a>(matrix: &'a Matrix, scratch: &'a mut Vec<f32>) -> &'a [f32] {
    match &matrix.data {
        MatrixData::F32(data) => data,
        MatrixData::Bf16(data) => {
            scratch.resize(data.len(), 0.0);
            let part = data.len().div_ceil(rayon::current_num_threads()).max(1 << 16);
            scratch.par_chunks_mut(part).zip(data.par_chunks(part)).for_each(|(to, from)| dispatch(Widen { from, to }));
            scratch
        }
    }
}

/// Widens `from` into `to`, of the same length.
struct Widen<'a, T> {
    from: &'a [T],
    to: &'a mut [f32],
}

impl<T: Element> Kernel for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (from, from_tail) = self.from.as_chunks::<LANES>();
        let (to, to_tail) = self.to.as_chunks_mut::<LANES>();
        for (to, from) in to.iter_mut().zip(from) {
            isa.store(to, T::load(isa, from));
        }
        let mut tail = [0.0; LANES];
        isa.store(&mut tail, load_part(isa, from_tail));
        to_tail.copy_from_slice(&tail[..to_tail.len()]);
    }
}

/// `y = x Wᵀ (+ bias)`, or `y += …` with `accumulate`.
///
/// - `w` `[out][in]`
/// - `bias` `[out]`
/// - `x` `[rows][in]`
/// - `y` `[rows][out]`
///
/// Runs on all threads of the current rayon pool. The same call gives the same bits; a different number of rows may
/// not, so prefill chunks have fixed sizes.
///
/// # Panics
/// When a slice's length does not match the shapes above.
pub fn matmul(w: &[f32], inputs: usize, bias: Option<&[f32]>, x: &[f32], y: &mut [f32], accumulate: bool) {
    assert!(inputs > 0, "matmul: no input features");
    let outputs = w.len() / inputs;
    let rows = x.len() / inputs;
    assert_eq!(w.len(), outputs * inputs, "matmul: w is not [out][{inputs}]");
    assert_eq!(x.len(), rows * inputs, "matmul: x is not [rows][{inputs}]");
    assert_eq!(y.len(), rows * outputs, "matmul: y is not [{rows}][{outputs}]");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), outputs, "matmul: bias is not [{outputs}]");
        for row in y.chunks_exact_mut(outputs) {
            if accumulate {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            } else {
                row.copy_from_slice(bias);
            }
        }
    }
    product(
        MatMut::from_row_major_slice_mut(y, rows, outputs),
        if accumulate || bias.is_some() { Accum::Add } else { Accum::Replace },
        MatRef::from_row_major_slice(x, rows, inputs),
        MatRef::from_row_major_slice(w, outputs, inputs).transpose(),
        1.0,
        Par::rayon(0),
    );
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{assert_close, in_pool, linear, noise};
    use super::*;

    #[test]
    fn matches_a_double_precision_product() {
        for (rows, inputs, outputs) in [(1, 1, 1), (3, 17, 5), (33, 64, 48), (40, 200, 65)] {
            let (w, x, bias) = (noise(outputs * inputs, 1), noise(rows * inputs, 2), noise(outputs, 3));
            let before = noise(rows * outputs, 4);
            for accumulate in [false, true] {
                for bias in [None, Some(&bias[..])] {
                    let mut y = before.clone();
                    matmul(&w, inputs, bias, &x, &mut y, accumulate);
                    let expected = linear(&w, inputs, bias, &x, accumulate.then_some(&before[..]));
                    assert_close(&y, &expected, 1e-5);
                }
            }
        }
    }

    #[test]
    fn the_same_call_gives_the_same_bits() {
        let (rows, inputs, outputs) = (128, 576, 320);
        let (w, x) = (noise(outputs * inputs, 1), noise(rows * inputs, 2));
        let run = || {
            let mut y = vec![0.0; rows * outputs];
            matmul(&w, inputs, None, &x, &mut y, false);
            y
        };
        let first = in_pool(2, run);
        for _ in 0..20 {
            assert_eq!(in_pool(2, run), first);
        }
    }

    #[test]
    fn widening_is_exact_and_borrows_f32() {
        for len in [1, 15, 16, 17, 70_001] {
            let values: Vec<bf16> = noise(len, 5).into_iter().map(bf16::from_f32).collect();
            let matrix = Matrix { rows: 1, cols: len, data: MatrixData::Bf16(values.clone()) };
            let mut scratch = Vec::new();
            let expected: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
            assert_eq!(widen(&matrix, &mut scratch), expected);
            let matrix = Matrix { rows: 1, cols: len, data: MatrixData::F32(expected.clone()) };
            let mut scratch = Vec::new();
            assert_eq!(widen(&matrix, &mut scratch), expected);
            assert!(scratch.is_empty());
        }
    }
}
