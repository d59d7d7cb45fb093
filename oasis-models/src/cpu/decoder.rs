//! The decoder's arithmetic apart from attention over the cache.

use crate::cpu::kernels::{rms_norm, rms_norm_heads};
use crate::cpu::linear::{Regime, linear};
use crate::cpu::mlp::gated_mlp;
use crate::cpu::moe;
use crate::cpu::rotation::Rotation;
use crate::rope::RotaryEmbedding;
use crate::spec::DecoderSpec;
use crate::weights::{AttentionWeights, DecoderWeights, LayerWeights, Matrix, MatrixData, Mlp};
use oasis_core::ids::TokenId;

/// A decoder's shape, weights and rotary table.
pub(super) struct Decoder {
    pub spec: DecoderSpec,
    pub weights: DecoderWeights,
    pub rope: RotaryEmbedding,
}

/// Shape of an attention layer, the target's or a draft head's.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionShape {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub norm_eps: f32,
}

impl AttentionShape {
    pub fn q_width(&self) -> usize {
        self.q_heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of one fused row: queries, keys, values.
    pub fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }

    /// Factor on attention scores.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Splits a fused row into queries, keys and values.
    pub fn split<'a>(&self, row: &'a [f32]) -> (&'a [f32], &'a [f32], &'a [f32]) {
        let (q, kv) = row.split_at(self.q_width());
        let (k, v) = kv.split_at(self.kv_width());
        (q, k, v)
    }
}

impl Decoder {
    pub fn new(spec: DecoderSpec, weights: DecoderWeights) -> Self {
        let rope = RotaryEmbedding::new(&spec.rope, spec.head_dim);
        Self { spec, weights, rope }
    }

    pub fn attention_shape(&self) -> AttentionShape {
        AttentionShape {
            q_heads: self.spec.q_heads,
            kv_heads: self.spec.kv_heads,
            head_dim: self.spec.head_dim,
            norm_eps: self.spec.norm_eps,
        }
    }

    /// Queries, keys and values of normalised inputs, fused rows `[rows][qkv_width]`, QK-normed and rotated.
    pub fn qkv(&self, regime: Regime, layer: &LayerWeights, x: &[f32], rotation: &Rotation) -> Vec<f32> {
        let mut normed = vec![0.0; x.len()];
        rms_norm(x, &layer.input_norm, self.spec.norm_eps, &mut normed);
        let attention = &layer.attention;
        project_qkv(regime, self.attention_shape(), &attention.qkv, attention, rotation, &normed)
    }

    /// Adds attention's output projection and the MLP to the residual stream `x[rows][hidden]`.
    pub fn finish_layer(&self, regime: Regime, layer: &LayerWeights, attended: &[f32], x: &mut [f32]) {
        linear(regime, &layer.attention.o, None, attended, x, true);
        let mut normed = vec![0.0; x.len()];
        rms_norm(x, &layer.post_attention_norm, self.spec.norm_eps, &mut normed);
        match &layer.mlp {
            Mlp::Dense(mlp) => gated_mlp(regime, mlp, &normed, x, true),
            Mlp::Moe { router, experts } => {
                let moe = self.spec.moe.as_ref().expect("a spec with experts describes their routing");
                moe::forward(regime, moe, router, experts, &normed, x);
            }
        }
    }

    /// Logits of rows of the residual stream, `[rows][vocab]`.
    pub fn logits(&self, x: &[f32]) -> Vec<f32> {
        let mut normed = vec![0.0; x.len()];
        rms_norm(x, &self.weights.norm, self.spec.norm_eps, &mut normed);
        let head = self.weights.lm_head.as_ref().unwrap_or(&self.weights.embed);
        let mut logits = vec![0.0; x.len() / self.spec.hidden * head.rows];
        linear(Regime::Decode, head, None, &normed, &mut logits, false);
        logits
    }
}

/// Fused queries, keys and values of rows `x`, with bias, QK-norm and RoPE. `projection` is `weights.qkv`, widened for a
/// prefill.
pub(super) fn project_qkv(
    regime: Regime,
    shape: AttentionShape,
    projection: &Matrix,
    weights: &AttentionWeights,
    rotation: &Rotation,
    x: &[f32],
) -> Vec<f32> {
    let width = shape.qkv_width();
    let mut qkv = vec![0.0; x.len() / projection.cols * width];
    linear(regime, projection, weights.qkv_bias.as_deref(), x, &mut qkv, false);
    if let Some(norm) = &weights.q_norm {
        rms_norm_heads(&mut qkv, width, 0..shape.q_heads, norm, shape.norm_eps);
    }
    if let Some(norm) = &weights.k_norm {
        rms_norm_heads(&mut qkv, width, shape.q_heads..shape.q_heads + shape.kv_heads, norm, shape.norm_eps);
    }
    rotation.apply(&mut qkv, width, shape.q_heads + shape.kv_heads);
    qkv
}

/// Embeddings of tokens, `[tokens][hidden]`.
pub(super) fn embed(table: &Matrix, tokens: impl IntoIterator<Item = TokenId>) -> Vec<f32> {
    let mut rows = Vec::new();
    for token in tokens {
        let range = token.index() * table.cols..(token.index() + 1) * table.cols;
        match &table.data {
            MatrixData::F32(data) => rows.extend_from_slice(&data[range]),
            MatrixData::Bf16(data) => rows.extend(data[range].iter().map(|x| x.to_f32())),
        }
    }
    rows
}
