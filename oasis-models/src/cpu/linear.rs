//! Linear layers in their two regimes.

use crate::cpu::kernels::{matmul, matvec};
use crate::weights::{AttentionWeights, GatedMlp, LayerWeights, Matrix, MatrixData, Mlp};

/// How many rows a linear layer sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Regime {
    /// The few rows of a decode step: weights are streamed once, every row has the same bits in any batch.
    Decode,
    /// The many rows of a prefill chunk: the matmul library, over weights in 32-bit floats.
    Prefill,
}

/// `y[rows][out] (+)= x[rows][in] W^T + bias`.
///
/// # Panics
/// In [`Regime::Prefill`], when the weights are not in 32-bit floats: see [`widened`].
pub(super) fn linear(regime: Regime, w: &Matrix, bias: Option<&[f32]>, x: &[f32], y: &mut [f32], accumulate: bool) {
    match (regime, &w.data) {
        (Regime::Decode, _) => matvec(w, bias, x, y, accumulate),
        (Regime::Prefill, MatrixData::F32(data)) => matmul(data, w.cols, bias, x, y, accumulate),
        (Regime::Prefill, MatrixData::Bf16(_)) => panic!("prefill weights are widened before use"),
    }
}

/// The layer in 32-bit floats, made once for all chunks of a prefill; `None` when it already is.
pub(super) fn widened(layer: &LayerWeights) -> Option<LayerWeights> {
    let mlp_is_wide = |mlp: &GatedMlp| is_wide(&mlp.gate_up) && is_wide(&mlp.down);
    let wide = is_wide(&layer.attention.qkv)
        && is_wide(&layer.attention.o)
        && match &layer.mlp {
            Mlp::Dense(mlp) => mlp_is_wide(mlp),
            Mlp::Moe { router, experts } => is_wide(router) && experts.iter().all(mlp_is_wide),
        };
    (!wide).then(|| {
        let widen_mlp = |mlp: &GatedMlp| GatedMlp { gate_up: widen(&mlp.gate_up), down: widen(&mlp.down) };
        let AttentionWeights { qkv, qkv_bias, q_norm, k_norm, o } = &layer.attention;
        LayerWeights {
            input_norm: layer.input_norm.clone(),
            attention: AttentionWeights {
                qkv: widen(qkv),
                qkv_bias: qkv_bias.clone(),
                q_norm: q_norm.clone(),
                k_norm: k_norm.clone(),
                o: widen(o),
            },
            post_attention_norm: layer.post_attention_norm.clone(),
            mlp: match &layer.mlp {
                Mlp::Dense(mlp) => Mlp::Dense(widen_mlp(mlp)),
                Mlp::Moe { router, experts } => {
                    Mlp::Moe { router: widen(router), experts: experts.iter().map(widen_mlp).collect() }
                }
            },
        }
    })
}

fn is_wide(matrix: &Matrix) -> bool {
    matches!(matrix.data, MatrixData::F32(_))
}

/// The matrix in 32-bit floats.
pub(super) fn widen(matrix: &Matrix) -> Matrix {
    let data = match &matrix.data {
        MatrixData::F32(data) => data.clone(),
        MatrixData::Bf16(data) => data.iter().map(|x| x.to_f32()).collect(),
    };
    Matrix { rows: matrix.rows, cols: matrix.cols, data: MatrixData::F32(data) }
}
