//! Models on the device: weights in bf16, projections fused as the checkpoint's loader fuses them.

mod upload;

use crate::device::{Device, DeviceBuffer, DeviceError};
use crate::kernels::Address;
use half::bf16;
use oasis_models::draft::{Eagle3Head, Eagle3Spec};
use oasis_models::rope::RotaryEmbedding;
use oasis_models::spec::{DecoderSpec, MoeSpec, RopeSpec};
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

/// A mixture of experts.
pub struct DeviceExperts {
    /// `[experts][hidden]`.
    pub router: DeviceMatrix,
    /// `[experts][2 * intermediate][hidden]`: the gates of an expert, then its ups.
    pub gate_up: DeviceBuffer<bf16>,
    /// `[experts][hidden][intermediate]`.
    pub down: DeviceBuffer<bf16>,
}

/// Feed-forward part of a layer.
pub enum FeedForward {
    /// One gated MLP.
    Dense(DeviceMlp),
    /// Several, of which each row takes a few.
    Experts(DeviceExperts),
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
    pub mlp: FeedForward,
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

/// The mixture of a layer; `None` where its MLP is dense.
pub(crate) fn mixture_of(spec: &DecoderSpec, layer: usize) -> Option<&MoeSpec> {
    spec.moe.as_ref().filter(|moe| moe.sparse_layers[layer])
}

/// Inner width of the dense MLPs; 0 where there are none.
pub(crate) fn dense_width(spec: &DecoderSpec) -> usize {
    if (0..spec.layers).all(|layer| mixture_of(spec, layer).is_some()) { 0 } else { spec.intermediate }
}

/// Elements of an expert.
fn expert_elements(spec: &DecoderSpec, moe: &MoeSpec) -> usize {
    3 * spec.hidden * moe.intermediate
}

/// Bytes of a model's weights on a device, by shape alone: of a mixture, the router and all experts.
pub fn weight_bytes(spec: &DecoderSpec, head: Option<&Eagle3Spec>) -> u64 {
    let mlp = |hidden: usize, inner: usize| 3 * hidden * inner;
    let qkv = |q_heads: usize, kv_heads: usize, head_dim: usize| (q_heads + 2 * kv_heads) * head_dim;
    let attention =
        qkv(spec.q_heads, spec.kv_heads, spec.head_dim) * spec.hidden + spec.q_heads * spec.head_dim * spec.hidden;
    let embeddings = if spec.tied_embeddings { 1 } else { 2 } * spec.vocab * spec.hidden;
    let feed_forward = |layer| match mixture_of(spec, layer) {
        Some(moe) => moe.experts * (spec.hidden + expert_elements(spec, moe)),
        None => mlp(spec.hidden, spec.intermediate),
    };
    let target = spec.layers * attention + (0..spec.layers).map(feed_forward).sum::<usize>() + embeddings;
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
    /// [`DeviceError`] when there is not enough memory, or weights are not what the shape says.
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

    /// Bytes of weights that a decode step reads, each once: all layers and the output projection, and the head where
    /// `draft`. Of a mixture it reads the router and the experts that some row of the step is routed to:
    /// `active_experts` of them, summed over the layers.
    pub fn step_bytes(&self, draft: bool, active_experts: usize) -> u64 {
        let head = self.head.as_ref().map(|head| &head.spec).filter(|_| draft);
        step_bytes(&self.spec, head, active_experts)
    }
}

fn step_bytes(spec: &DecoderSpec, head: Option<&Eagle3Spec>, active_experts: usize) -> u64 {
    let embeddings = if spec.tied_embeddings { 0 } else { 2 * (spec.vocab * spec.hidden) as u64 };
    let idle = spec.moe.as_ref().map_or(0, |moe| {
        let all = moe.experts * (0..spec.layers).filter(|layer| mixture_of(spec, *layer).is_some()).count();
        2 * (all.saturating_sub(active_experts) * expert_elements(spec, moe)) as u64
    });
    weight_bytes(spec, head) - embeddings - idle
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

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_models::shapes;

    fn billions(bytes: u64) -> f64 {
        bytes as f64 / 2e9
    }

    #[test]
    fn weights_are_as_many_as_the_models_cards_say() {
        for (name, parameters) in [("qwen3-8b", 8.19), ("llama-3.1-8b", 8.03), ("qwen3-30b-a3b", 30.53)] {
            let (spec, _) = shapes::named(name).expect("the name is known");
            let found = billions(weight_bytes(&spec, None));
            assert!((found - parameters).abs() < 0.01, "{name}: {found} billion");
        }
    }

    #[test]
    fn a_step_reads_the_experts_that_have_rows() {
        let (mut spec, _) = shapes::named("qwen3-30b-a3b").expect("the name is known");
        // The card says 3.3 billion a token, its row of the embedding counted as the whole of it.
        let embedding = (spec.vocab * spec.hidden) as f64 / 1e9;
        let found = billions(step_bytes(&spec, None, 48 * 8)) + embedding;
        assert!((found - 3.35).abs() < 0.01, "{found} billion");
        let all = step_bytes(&spec, None, 48 * 128);
        assert_eq!(all, weight_bytes(&spec, None) - 2 * (spec.vocab * spec.hidden) as u64);
        // A dense layer as wide as 8 experts costs the same, but for the router.
        let sparse = step_bytes(&spec, None, 48 * 8);
        spec.intermediate = 8 * 768;
        spec.moe.as_mut().expect("a mixture").sparse_layers[0] = false;
        assert_eq!(step_bytes(&spec, None, 47 * 8), sparse - 2 * (128 * spec.hidden) as u64);
    }
}
