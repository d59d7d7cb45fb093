//! Models on the device: weights in bf16, projections fused as the checkpoint's loader fuses them.

mod upload;

use crate::device::{Device, DeviceBuffer, DeviceError};
use crate::kernels::Address;
use half::bf16;
use oasis_models::draft::{Eagle3Head, Eagle3Spec};
use oasis_models::rope::RotaryEmbedding;
use oasis_models::spec::{DecoderSpec, RopeSpec};
use oasis_models::weights::DecoderWeights;
use upload::Source;

/// A row-major matrix `[rows][cols]` in bf16.
pub struct DeviceMatrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    data: DeviceBuffer<bf16>,
}

impl DeviceMatrix {
    /// Where it is.
    pub fn address(&self) -> Address {
        self.data.address()
    }
}

/// A vector in bf16: the weight of a norm, a bias.
pub type DeviceVector = DeviceBuffer<bf16>;

/// An attention layer's projections and norms.
pub struct DeviceAttention {
    /// `[(q_heads + 2 * kv_heads) * head_dim][in]`.
    pub qkv: DeviceMatrix,
    /// `[(q_heads + 2 * kv_heads) * head_dim]`.
    pub qkv_bias: Option<DeviceVector>,
    /// `[head_dim]`.
    pub q_norm: Option<DeviceVector>,
    /// `[head_dim]`.
    pub k_norm: Option<DeviceVector>,
    /// `[hidden][q_heads * head_dim]`.
    pub o: DeviceMatrix,
}

/// A gated MLP.
pub struct DeviceMlp {
    /// `[2 * intermediate][hidden]`.
    pub gate_up: DeviceMatrix,
    /// `[hidden][intermediate]`.
    pub down: DeviceMatrix,
}

/// A decoder layer.
pub struct DeviceLayer {
    /// `[hidden]`.
    pub input_norm: DeviceVector,
    /// Attention.
    pub attention: DeviceAttention,
    /// `[hidden]`.
    pub post_attention_norm: DeviceVector,
    /// Feed-forward part.
    pub mlp: DeviceMlp,
}

/// An EAGLE-3 head.
pub struct DeviceHead {
    /// Shape and arithmetic.
    pub spec: Eagle3Spec,
    /// Target layers whose input is tapped.
    pub taps: [usize; 3],
    /// `[hidden][3 * target_hidden]`.
    pub fc: DeviceMatrix,
    /// `[hidden]`, for the embedding half.
    pub input_norm: DeviceVector,
    /// `[hidden]`, for the hidden-state half.
    pub hidden_norm: DeviceVector,
    /// Attention; `qkv` takes both halves.
    pub attention: DeviceAttention,
    /// `[hidden]`.
    pub post_attention_norm: DeviceVector,
    /// Feed-forward part.
    pub mlp: DeviceMlp,
    /// `[hidden]`.
    pub norm: DeviceVector,
    /// `[draft_vocab][hidden]`.
    pub lm_head: DeviceMatrix,
    /// Token of the target a draft id; `None` when both vocabularies are one.
    pub target_ids: Option<DeviceBuffer<i32>>,
    /// Own embedding, where the head has one.
    pub embed: Option<DeviceMatrix>,
    /// f32 pairs `[positions][head_dim / 2]`.
    pub rotation: DeviceBuffer<[f32; 2]>,
}

/// A decoder and, where there is one, its draft head.
pub struct DeviceModel {
    /// Shape and arithmetic.
    pub spec: DecoderSpec,
    /// `[vocab][hidden]`.
    pub embed: DeviceMatrix,
    /// Layers, in order.
    pub layers: Vec<DeviceLayer>,
    /// `[hidden]`.
    pub norm: DeviceVector,
    /// Output projection; `None` when tied to `embed`.
    pub lm_head: Option<DeviceMatrix>,
    /// f32 pairs `[positions][head_dim / 2]`.
    pub rotation: DeviceBuffer<[f32; 2]>,
    /// Draft head.
    pub head: Option<DeviceHead>,
}

/// Bytes of a model's weights on a device, by shape alone.
pub fn weight_bytes(spec: &DecoderSpec, head: Option<&Eagle3Spec>) -> u64 {
    let mlp = |hidden: usize, inner: usize| 3 * hidden * inner;
    let qkv = |q_heads: usize, kv_heads: usize, head_dim: usize| (q_heads + 2 * kv_heads) * head_dim;
    let attention =
        qkv(spec.q_heads, spec.kv_heads, spec.head_dim) * spec.hidden + spec.q_heads * spec.head_dim * spec.hidden;
    let embeddings = if spec.tied_embeddings { 1 } else { 2 } * spec.vocab * spec.hidden;
    let target = spec.layers * (attention + mlp(spec.hidden, spec.intermediate)) + embeddings;
    let head = head.map_or(0, |h| {
        let attention = qkv(h.q_heads, h.kv_heads, h.head_dim) * 2 * h.hidden + h.q_heads * h.head_dim * h.hidden;
        let own = if h.target_hidden == h.hidden { 0 } else { spec.vocab * h.hidden };
        3 * h.target_hidden * h.hidden + attention + mlp(h.hidden, h.intermediate) + h.draft_vocab * h.hidden + own
    });
    2 * (target + head) as u64
}

impl DeviceModel {
    /// Copies a model's weights to the device. `positions` is the longest context that will be run.
    ///
    /// # Errors
    /// [`DeviceError`] when there is not enough memory, or the model has parts that the device does not run.
    pub fn upload(
        device: &Device,
        spec: &DecoderSpec,
        weights: &DecoderWeights,
        head: Option<&Eagle3Head>,
        positions: usize,
    ) -> Result<Self, DeviceError> {
        upload::decoder(device, spec, Source::loaded(weights, head), head.map(|h| &h.spec), positions)
    }

    /// A model of which only the shape matters: weights are random numbers, the same for the same seed.
    ///
    /// # Errors
    /// [`DeviceError`] when there is not enough memory.
    pub fn random(
        device: &Device,
        spec: &DecoderSpec,
        head: Option<&Eagle3Spec>,
        positions: usize,
        seed: u64,
    ) -> Result<Self, DeviceError> {
        upload::decoder(device, spec, Source::random(device, seed)?, head, positions)
    }

    /// The output projection.
    pub fn output(&self) -> &DeviceMatrix {
        self.lm_head.as_ref().unwrap_or(&self.embed)
    }

    /// Bytes of weights that a decode step reads: all layers and the output projection, and the head where `draft`.
    pub fn step_bytes(&self, draft: bool) -> u64 {
        let spec = &self.spec;
        let embeddings = 2 * (spec.vocab * spec.hidden) as u64;
        let own = if spec.tied_embeddings { 0 } else { embeddings };
        let head = if draft { self.head.as_ref().map(|head| &head.spec) } else { None };
        weight_bytes(spec, head) - own
    }
}

/// Cosines and sines of all positions.
fn rotation(
    device: &Device,
    rope: &RopeSpec,
    head_dim: usize,
    positions: usize,
) -> Result<DeviceBuffer<[f32; 2]>, DeviceError> {
    let rope = RotaryEmbedding::new(rope, head_dim);
    let angles: Vec<[f32; 2]> = (0..positions).flat_map(|position| rope.angles(position)).collect();
    device.upload(&angles)
}
