//! Linear layers of a decode step: a few input rows, one pass over the weights.
//!
//! A decode step is bound by reading the weights, so every weight is read from memory once for all input rows, in the
//! precision it is stored in. Each output element is one dot product accumulated in a fixed order: its bits depend on
//! its own input row and weight row alone, not on the other rows of the call nor on the number of threads.

use rayon::prelude::*;

use super::simd::{Element, Isa, Kernel, LANES, dispatch, load_part};
use crate::weights::{Matrix, MatrixData};

/// Tasks start at multiples of this many weight rows.
const TILE: usize = 4;

/// Bytes of weights worth a task of their own; below twice this a call stays on its thread.
const TASK_BYTES: usize = 192 << 10;

/// `y = x Wᵀ (+ bias)`, or `y += …` with `accumulate`.
///
/// - `w` `[out][in]`, f32 or bf16 (widened exactly); accumulation in f32
/// - `bias` `[out]`
/// - `x` `[rows][in]`, any number of rows; meant for up to about 16
/// - `y` `[rows][out]`
///
/// Weight rows are spread over the current rayon pool; a caller that is itself on a pool thread saves the hand-over.
///
/// # Panics
/// When a slice's length does not match the shapes above.
pub fn matvec(w: &Matrix, bias: Option<&[f32]>, x: &[f32], y: &mut [f32], accumulate: bool) {
    if w.rows == 0 || y.is_empty() {
        return;
    }
    let rows = y.len() / w.rows;
    assert_eq!(y.len(), rows * w.rows, "matvec: y is not [rows][{}]", w.rows);
    assert_eq!(x.len(), rows * w.cols, "matvec: x is not [{rows}][{}]", w.cols);
    if let Some(bias) = bias {
        assert_eq!(bias.len(), w.rows, "matvec: bias is not [{}]", w.rows);
    }
    let call = Call { cols: w.cols, bias, x, accumulate };
    match &w.data {
        MatrixData::F32(data) => call.spread(data, y, w.rows),
        MatrixData::Bf16(data) => call.spread(data, y, w.rows),
    }
}

/// What every task of one call shares.
struct Call<'a> {
    cols: usize,
    bias: Option<&'a [f32]>,
    x: &'a [f32],
    accumulate: bool,
}

impl Call<'_> {
    /// Splits the `outputs` weight rows into tasks.
    fn spread<T: Element>(&self, w: &[T], y: &mut [f32], outputs: usize) {
        assert_eq!(w.len(), outputs * self.cols, "matvec: w is not [{outputs}][{}]", self.cols);
        let bytes = size_of_val(w);
        let tasks = (bytes / TASK_BYTES).clamp(1, 4 * rayon::current_num_threads());
        let mut ys: Vec<&mut [f32]> = y.chunks_exact_mut(outputs).collect();
        if tasks == 1 {
            return dispatch(Columns { call: self, w, start: 0, ys: &mut ys });
        }
        let step = outputs.div_ceil(tasks).next_multiple_of(TILE);
        let mut work = Vec::with_capacity(tasks);
        let mut start = 0;
        while start < outputs {
            let len = step.min(outputs - start);
            let part: Vec<&mut [f32]> =
                ys.iter_mut().map(|y| y.split_off_mut(..len).expect("len is at most what is left")).collect();
            work.push((start, part));
            start += len;
        }
        work.into_par_iter().with_max_len(1).for_each(|(start, mut part)| {
            let len = part[0].len();
            let w = &w[start * self.cols..][..len * self.cols];
            dispatch(Columns { call: self, w, start, ys: &mut part });
        });
    }

    /// `W` outputs for all input rows; the weight rows stay in cache from one group of input rows to the next.
    #[inline(always)]
    fn tile<const W: usize, T: Element, S: Isa>(
        &self,
        isa: S,
        w: &[T],
        first: usize,
        start: usize,
        ys: &mut [&mut [f32]],
    ) {
        let mut row = 0;
        while row < ys.len() {
            let x = &self.x[row * self.cols..];
            row += match ys.len() - row {
                8.. => self.store(products::<W, 8, T, S>(isa, w, x, self.cols), row, first, start, ys),
                1 => self.store(products::<W, 1, T, S>(isa, w, x, self.cols), row, first, start, ys),
                2 => self.store(products::<W, 2, T, S>(isa, w, x, self.cols), row, first, start, ys),
                3 => self.store(products::<W, 3, T, S>(isa, w, x, self.cols), row, first, start, ys),
                _ => self.store(products::<W, 4, T, S>(isa, w, x, self.cols), row, first, start, ys),
            };
        }
    }

    /// Writes a tile of dot products; returns the number of input rows it covers.
    #[inline(always)]
    fn store<const W: usize, const R: usize>(
        &self,
        products: [[f32; W]; R],
        row: usize,
        first: usize,
        start: usize,
        ys: &mut [&mut [f32]],
    ) -> usize {
        for (products, y) in products.iter().zip(&mut ys[row..]) {
            for (i, (y, &product)) in y[first..].iter_mut().zip(products).enumerate() {
                let value = self.bias.map_or(product, |bias| product + bias[start + first + i]);
                *y = if self.accumulate { *y + value } else { value };
            }
        }
        R
    }
}

/// One task: outputs `start..` for all input rows.
struct Columns<'c, 'y, T> {
    call: &'c Call<'c>,
    /// Weight rows of these outputs.
    w: &'c [T],
    start: usize,
    /// Their places, one slice an input row.
    ys: &'c mut [&'y mut [f32]],
}

impl<T: Element> Kernel for Columns<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        // Sixteen accumulators at most: four weight rows by four input rows, or two by eight.
        if self.ys.len() < 8 { self.tiles::<4, S>(isa) } else { self.tiles::<2, S>(isa) }
    }
}

impl<T: Element> Columns<'_, '_, T> {
    /// All outputs, `W` weight rows at a time.
    #[inline(always)]
    fn tiles<const W: usize, S: Isa>(self, isa: S) {
        let cols = self.call.cols;
        let outputs = self.ys[0].len();
        let mut first = 0;
        while first + W <= outputs {
            self.call.tile::<W, T, S>(isa, &self.w[first * cols..], first, self.start, self.ys);
            first += W;
        }
        while first < outputs {
            self.call.tile::<1, T, S>(isa, &self.w[first * cols..], first, self.start, self.ys);
            first += 1;
        }
    }
}

/// Dot products of the first `W` rows of `w` with the first `R` rows of `x`, `[R][W]`.
#[inline(always)]
fn products<const W: usize, const R: usize, T: Element, S: Isa>(
    isa: S,
    w: &[T],
    x: &[f32],
    cols: usize,
) -> [[f32; W]; R] {
    let mut acc = [[isa.splat(0.0); W]; R];
    let mut weights = [isa.splat(0.0); W];
    let vectors = cols / LANES;
    let w_rows: [&[[T; LANES]]; W] = std::array::from_fn(
        #[inline(always)]
        |i| &w[i * cols..][..cols].as_chunks().0[..vectors],
    );
    let x_rows: [&[[f32; LANES]]; R] = std::array::from_fn(
        #[inline(always)]
        |r| &x[r * cols..][..cols].as_chunks().0[..vectors],
    );
    for at in 0..vectors {
        for i in 0..W {
            weights[i] = T::load(isa, &w_rows[i][at]);
        }
        for r in 0..R {
            let input = isa.load(&x_rows[r][at]);
            for i in 0..W {
                acc[r][i] = isa.mul_add(weights[i], input, acc[r][i]);
            }
        }
    }
    let tail = vectors * LANES..cols;
    if !tail.is_empty() {
        for i in 0..W {
            weights[i] = load_part(isa, &w[i * cols..][tail.clone()]);
        }
        for r in 0..R {
            let input = load_part(isa, &x[r * cols..][tail.clone()]);
            for i in 0..W {
                acc[r][i] = isa.mul_add(weights[i], input, acc[r][i]);
            }
        }
    }
    let mut out = [[0.0; W]; R];
    for r in 0..R {
        for i in 0..W {
            out[r][i] = isa.sum(acc[r][i]);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{assert_close, in_pool, linear, noise};
    use super::*;

    fn matrix(rows: usize, cols: usize, narrow: bool) -> Matrix {
        let data = noise(rows * cols, (rows * 31 + cols) as u64);
        let data = if narrow {
            MatrixData::Bf16(data.into_iter().map(bf16::from_f32).collect())
        } else {
            MatrixData::F32(data)
        };
        Matrix { rows, cols, data }
    }

    fn apply(w: &Matrix, x: &[f32]) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len() / w.cols * w.rows];
        matvec(w, None, x, &mut y, false);
        y
    }

    #[test]
    fn matches_a_double_precision_product() {
        for (outputs, inputs) in [(1, 1), (5, 17), (7, 16), (64, 100), (513, 576)] {
            for narrow in [false, true] {
                let w = matrix(outputs, inputs, narrow);
                let mut scratch = Vec::new();
                let wide = super::super::widen(&w, &mut scratch);
                let bias = noise(outputs, 3);
                for rows in [1, 2, 3, 4, 5, 7, 8, 9, 16, 17] {
                    let (x, before) = (noise(rows * inputs, 2), noise(rows * outputs, 4));
                    for (bias, accumulate) in [(None, false), (Some(&bias[..]), false), (Some(&bias[..]), true)] {
                        let mut y = before.clone();
                        matvec(&w, bias, &x, &mut y, accumulate);
                        assert_close(&y, &linear(wide, inputs, bias, &x, accumulate.then_some(&before[..])), 1e-5);
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads() {
        for (outputs, inputs) in [(9, 33), (1030, 576)] {
            for narrow in [false, true] {
                let w = matrix(outputs, inputs, narrow);
                let x = noise(19 * inputs, 9);
                let alone: Vec<f32> = x.chunks(inputs).flat_map(|x| in_pool(1, || apply(&w, x))).collect();
                for rows in 1..=19 {
                    for threads in [1, 2, 5] {
                        let together = in_pool(threads, || apply(&w, &x[..rows * inputs]));
                        assert_eq!(together, alone[..rows * outputs], "{rows} rows, {threads} threads");
                    }
                }
            }
        }
    }

    #[test]
    fn no_rows_and_no_outputs_are_nothing_to_do() {
        matvec(&matrix(4, 8, true), None, &[], &mut [], false);
        matvec(&matrix(0, 8, true), None, &noise(16, 1), &mut [], false);
    }
}
