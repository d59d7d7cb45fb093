//! The SwiGLU feed-forward network.

use crate::cpu::kernels::swiglu;
use crate::cpu::linear::{Regime, linear};
use crate::weights::GatedMlp;

/// `y (+)= down(silu(gate x) * up x)` for every row.
pub(super) fn gated_mlp(regime: Regime, mlp: &GatedMlp, x: &[f32], y: &mut [f32], accumulate: bool) {
    let rows = x.len() / mlp.gate_up.cols;
    let inner = mlp.down.cols;
    let mut gate_up = vec![0.0; rows * 2 * inner];
    linear(regime, &mlp.gate_up, None, x, &mut gate_up, false);
    let mut activated = vec![0.0; rows * inner];
    swiglu(&gate_up, inner, &mut activated);
    linear(regime, &mlp.down, None, &activated, y, accumulate);
}
