//! A decoder and a draft head of random weights: small enough to be run thousands of times.

use half::bf16;
use oasis_core::testkit::Random;
use oasis_models::cpu::CpuModel;
use oasis_models::draft::{Eagle3Head, Eagle3Spec, Eagle3Weights};
use oasis_models::spec::{DecoderSpec, RopeScaling, RopeSpec};
use oasis_models::weights::{AttentionWeights, DecoderWeights, GatedMlp, LayerWeights, Matrix, MatrixData, Mlp};
use std::sync::Arc;

/// Layers.
pub const LAYERS: usize = 2;
/// KV heads of a layer.
pub const KV_HEADS: usize = 2;
/// Elements of one head.
pub const HEAD_DIM: usize = 16;
/// Vocabulary.
pub const VOCAB: usize = 64;
/// Longest context.
pub const CONTEXT: usize = 512;

/// Sizes of a decoder and of its draft head.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Elements of a hidden state.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub q_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements within the MLP.
    pub inner: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// The head's vocabulary: tokens from 3 on.
    pub draft_vocab: usize,
    /// Longest context.
    pub context: usize,
    /// Whether matrices are in bf16.
    pub rounded: bool,
}

impl Shape {
    const SMALL: Self = Self {
        hidden: 32,
        layers: LAYERS,
        q_heads: 4,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        inner: 48,
        vocab: VOCAB,
        draft_vocab: 40,
        context: CONTEXT,
        rounded: false,
    };

    /// Vocabularies and context of models whose matrices are in bf16.
    pub fn rounded() -> Self {
        Self { vocab: 2_000, draft_vocab: 504, context: 4_096, rounded: true, ..Self::SMALL }
    }
}

/// Makes weights of a shape.
struct Maker<'a> {
    random: Random,
    shape: &'a Shape,
}

impl Maker<'_> {
    fn matrix(&mut self, rows: usize, cols: usize, scale: f32) -> Matrix {
        let scale = scale / (cols as f32).sqrt();
        let values: Vec<f32> = self.random.floats(rows * cols).iter().map(|x| x * scale).collect();
        let data = match self.shape.rounded {
            false => MatrixData::F32(values),
            true => MatrixData::Bf16(values.into_iter().map(bf16::from_f32).collect()),
        };
        Matrix { rows, cols, data }
    }

    fn attention(&mut self, q_heads: usize, kv_heads: usize, inputs: usize) -> AttentionWeights {
        let Shape { head_dim, hidden, .. } = *self.shape;
        AttentionWeights {
            // Large enough that attention prefers some positions to others.
            qkv: self.matrix((q_heads + 2 * kv_heads) * head_dim, inputs, 4.0),
            qkv_bias: None,
            q_norm: None,
            k_norm: None,
            o: self.matrix(hidden, q_heads * head_dim, 3.0),
        }
    }

    fn mlp(&mut self) -> GatedMlp {
        let Shape { hidden, inner, .. } = *self.shape;
        GatedMlp { gate_up: self.matrix(2 * inner, hidden, 2.0), down: self.matrix(hidden, inner, 1.0) }
    }

    fn head(&mut self) -> Eagle3Head {
        let Shape { hidden, layers, q_heads, kv_heads, head_dim, inner, draft_vocab, .. } = *self.shape;
        let (q_heads, kv_heads) = (q_heads / kv_heads * (kv_heads / 2).max(1), (kv_heads / 2).max(1));
        let spec = Eagle3Spec {
            hidden,
            target_hidden: hidden,
            intermediate: inner,
            q_heads,
            kv_heads,
            head_dim,
            draft_vocab,
            norm_eps: 1e-6,
            rope: rope(),
            taps: Some([0, layers / 2, layers - 1]),
        };
        let weights = Eagle3Weights {
            fc: self.matrix(hidden, 3 * hidden, 1.0),
            input_norm: vec![1.0; hidden],
            hidden_norm: vec![1.0; hidden],
            attention: self.attention(q_heads, kv_heads, 2 * hidden),
            post_attention_norm: vec![1.0; hidden],
            mlp: self.mlp(),
            norm: vec![1.0; hidden],
            lm_head: self.matrix(draft_vocab, hidden, 1.0),
            target_ids: Some((0..draft_vocab as u32).map(|id| id + 3).collect()),
            embed: None,
        };
        Eagle3Head { spec, weights }
    }
}

fn rope() -> RopeSpec {
    RopeSpec { theta: 10_000.0, scaling: RopeScaling::None }
}

/// Weights that depend on nothing but `seed` and shape.
pub fn weights(seed: u64, shape: &Shape) -> (DecoderSpec, DecoderWeights, Eagle3Head) {
    let Shape { hidden, layers, q_heads, kv_heads, head_dim, inner, vocab, context, .. } = *shape;
    let mut maker = Maker { random: Random::new(seed), shape };
    let spec = DecoderSpec {
        family: "synthetic".to_owned(),
        hidden,
        layers,
        q_heads,
        kv_heads,
        head_dim,
        intermediate: inner,
        vocab,
        norm_eps: 1e-6,
        max_positions: context,
        rope: rope(),
        tied_embeddings: false,
        qk_norm: false,
        attention_bias: false,
        moe: None,
        eos: vec![0],
        bos: None,
    };
    let layers = (0..layers).map(|_| LayerWeights {
        input_norm: vec![1.0; hidden],
        attention: maker.attention(q_heads, kv_heads, hidden),
        post_attention_norm: vec![1.0; hidden],
        mlp: Mlp::Dense(maker.mlp()),
    });
    let layers = layers.collect();
    let weights = DecoderWeights {
        embed: maker.matrix(vocab, hidden, 4.0),
        layers,
        norm: vec![1.0; hidden],
        lm_head: Some(maker.matrix(vocab, hidden, 2.0)),
    };
    (spec, weights, maker.head())
}

/// A model that depends on nothing but `seed`.
pub fn model(seed: u64) -> Arc<CpuModel> {
    let (spec, weights, head) = weights(seed, &Shape::SMALL);
    Arc::new(CpuModel::new(spec, weights, Some(Arc::new(head))))
}
