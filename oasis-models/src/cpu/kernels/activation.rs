//! The gated activation of SwiGLU.

use rayon::prelude::*;

use super::simd::{Isa, Kernel, dispatch, exp};

/// Elements worth a task of their own.
const TASK: usize = 1 << 15;

/// `out = silu(gate) * up`, where `silu(x) = x / (1 + e^-x)`.
///
/// - `gate_up` `[rows][2 * width]`: the gates of a row, then its ups
/// - `out` `[rows][width]`
///
/// Large calls are spread over the current rayon pool.
///
/// # Panics
/// When a slice's length does not match the shapes above.
pub fn swiglu(gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len(), "swiglu: gate_up is not [rows][2 * {width}]");
    if out.is_empty() {
        return;
    }
    assert_eq!(out.len() % width, 0, "swiglu: out is not [rows][{width}]");
    let rows = (TASK / width).max(1);
    if out.len() <= rows * width {
        return dispatch(SwiGlu { gate_up, width, out });
    }
    gate_up
        .par_chunks(2 * rows * width)
        .zip(out.par_chunks_mut(rows * width))
        .for_each(|(gate_up, out)| dispatch(SwiGlu { gate_up, width, out }));
}

/// One task of [`swiglu`].
struct SwiGlu<'a> {
    gate_up: &'a [f32],
    width: usize,
    out: &'a mut [f32],
}

impl Kernel for SwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, _: S) {
        let width = self.width;
        for (gate_up, out) in self.gate_up.chunks_exact(2 * width).zip(self.out.chunks_exact_mut(width)) {
            let (gate, up) = gate_up.split_at(width);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (1.0 + exp(-gate)) * up;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, in_pool, noise};
    use super::*;

    #[test]
    fn matches_double_precision_on_odd_widths_and_large_gates() {
        for width in [1, 15, 16, 100] {
            let gate_up: Vec<f32> = noise(3 * 2 * width, 1).iter().map(|x| x * 120.0).collect();
            let mut out = vec![0.0; 3 * width];
            swiglu(&gate_up, width, &mut out);
            let row = |row: &[f32]| {
                let pair = |i: usize| (f64::from(row[i]), f64::from(row[width + i]));
                (0..width).map(pair).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect::<Vec<_>>()
            };
            let expected: Vec<f64> = gate_up.chunks(2 * width).flat_map(row).collect();
            assert_close(&out, &expected, 1e-6);
        }
    }

    #[test]
    fn rows_and_threads_do_not_change_a_row() {
        let (rows, width) = (50, 1531);
        let gate_up = noise(rows * 2 * width, 3);
        let run = |threads, gate_up: &[f32]| {
            let mut out = vec![0.0; gate_up.len() / 2];
            in_pool(threads, || swiglu(gate_up, width, &mut out));
            out
        };
        let alone: Vec<f32> = gate_up.chunks(2 * width).flat_map(|row| run(1, row)).collect();
        assert_eq!(run(1, &gate_up), alone);
        assert_eq!(run(2, &gate_up), alone);
    }
}
