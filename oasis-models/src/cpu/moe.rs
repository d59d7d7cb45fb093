//! Mixture of experts: route every row to a few gated MLPs (Qwen3-MoE).

use crate::cpu::linear::{Regime, linear};
use crate::cpu::mlp::gated_mlp;
use crate::spec::MoeSpec;
use crate::weights::{GatedMlp, Matrix};

/// Adds the routed experts' output of rows `x[rows][hidden]` to `y`.
///
/// Each row's experts are added in the order of their numbers, so that its value does not depend on other rows.
pub(super) fn forward(regime: Regime, spec: &MoeSpec, router: &Matrix, experts: &[GatedMlp], x: &[f32], y: &mut [f32]) {
    let hidden = router.cols;
    let rows = x.len() / hidden;
    let mut logits = vec![0.0; rows * router.rows];
    linear(regime, router, None, x, &mut logits, false);

    // For every expert, the rows routed to it and their weights.
    let mut routed: Vec<Vec<(usize, f32)>> = vec![Vec::new(); experts.len()];
    for (row, logits) in logits.chunks_exact(router.rows).enumerate() {
        for (expert, weight) in route(spec, logits) {
            routed[expert].push((row, weight));
        }
    }
    for (expert, rows) in experts.iter().zip(&routed).filter(|(_, rows)| !rows.is_empty()) {
        let gathered: Vec<f32> = rows.iter().flat_map(|&(row, _)| &x[row * hidden..][..hidden]).copied().collect();
        let mut out = vec![0.0; gathered.len()];
        gated_mlp(regime, expert, &gathered, &mut out, false);
        for (&(row, weight), out) in rows.iter().zip(out.chunks_exact(hidden)) {
            for (y, out) in y[row * hidden..][..hidden].iter_mut().zip(out) {
                *y += weight * out;
            }
        }
    }
}

/// The chosen experts of one row and their weights: softmax over all experts, then the largest; ties to the lower number.
fn route(spec: &MoeSpec, logits: &[f32]) -> Vec<(usize, f32)> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f32> = logits.iter().map(|l| (l - max).exp()).collect();
    let sum: f32 = exps.iter().sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| exps[b].total_cmp(&exps[a]).then(a.cmp(&b)));
    order.truncate(spec.experts_per_token);
    let chosen: f32 = order.iter().map(|&e| exps[e]).sum();
    let scale = if spec.normalize { chosen } else { sum };
    order.into_iter().map(|expert| (expert, exps[expert] / scale)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_normalised_only_when_the_model_says_so() {
        let spec = |normalize| MoeSpec {
            experts: 3,
            experts_per_token: 2,
            intermediate: 1,
            normalize,
            sparse_layers: vec![true],
        };
        let logits = [1.0f32.ln(), 2.0f32.ln(), 1.0f32.ln()];
        assert_eq!(route(&spec(true), &logits), [(1, 2.0 / 3.0), (0, 1.0 / 3.0)]);
        assert_eq!(route(&spec(false), &logits), [(1, 0.5), (0, 0.25)]);
    }
}
