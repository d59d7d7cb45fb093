//! A decoder and a draft head of random weights: small enough to be run thousands of times.

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

const HIDDEN: usize = 32;
const Q_HEADS: usize = 4;
const INNER: usize = 48;
const DRAFT_VOCAB: usize = 40;

fn matrix(random: &mut Random, rows: usize, cols: usize, scale: f32) -> Matrix {
    let scale = scale / (cols as f32).sqrt();
    Matrix { rows, cols, data: MatrixData::F32(random.floats(rows * cols).iter().map(|x| x * scale).collect()) }
}

fn attention(random: &mut Random, q_heads: usize, kv_heads: usize, inputs: usize) -> AttentionWeights {
    AttentionWeights {
        // Large enough that attention prefers some positions to others.
        qkv: matrix(random, (q_heads + 2 * kv_heads) * HEAD_DIM, inputs, 4.0),
        qkv_bias: None,
        q_norm: None,
        k_norm: None,
        o: matrix(random, HIDDEN, q_heads * HEAD_DIM, 3.0),
    }
}

fn mlp(random: &mut Random) -> GatedMlp {
    GatedMlp { gate_up: matrix(random, 2 * INNER, HIDDEN, 2.0), down: matrix(random, HIDDEN, INNER, 1.0) }
}

fn rope() -> RopeSpec {
    RopeSpec { theta: 10_000.0, scaling: RopeScaling::None }
}

fn head(random: &mut Random) -> Eagle3Head {
    let spec = Eagle3Spec {
        hidden: HIDDEN,
        target_hidden: HIDDEN,
        intermediate: INNER,
        q_heads: 2,
        kv_heads: 1,
        head_dim: HEAD_DIM,
        draft_vocab: DRAFT_VOCAB,
        norm_eps: 1e-6,
        rope: rope(),
        taps: Some([0, 1, 1]),
    };
    let weights = Eagle3Weights {
        fc: matrix(random, HIDDEN, 3 * HIDDEN, 1.0),
        input_norm: vec![1.0; HIDDEN],
        hidden_norm: vec![1.0; HIDDEN],
        attention: attention(random, 2, 1, 2 * HIDDEN),
        post_attention_norm: vec![1.0; HIDDEN],
        mlp: mlp(random),
        norm: vec![1.0; HIDDEN],
        lm_head: matrix(random, DRAFT_VOCAB, HIDDEN, 1.0),
        target_ids: Some((0..DRAFT_VOCAB as u32).map(|id| id + 3).collect()),
        embed: None,
    };
    Eagle3Head { spec, weights }
}

/// A model that depends on nothing but `seed`.
pub fn model(seed: u64) -> Arc<CpuModel> {
    let random = &mut Random::new(seed);
    let spec = DecoderSpec {
        family: "synthetic".to_owned(),
        hidden: HIDDEN,
        layers: LAYERS,
        q_heads: Q_HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        intermediate: INNER,
        vocab: VOCAB,
        norm_eps: 1e-6,
        max_positions: CONTEXT,
        rope: rope(),
        tied_embeddings: false,
        qk_norm: false,
        attention_bias: false,
        moe: None,
        eos: vec![0],
        bos: None,
    };
    let layers = (0..LAYERS).map(|_| LayerWeights {
        input_norm: vec![1.0; HIDDEN],
        attention: attention(random, Q_HEADS, KV_HEADS, HIDDEN),
        post_attention_norm: vec![1.0; HIDDEN],
        mlp: Mlp::Dense(mlp(random)),
    });
    let layers = layers.collect();
    let weights = DecoderWeights {
        embed: matrix(random, VOCAB, HIDDEN, 4.0),
        layers,
        norm: vec![1.0; HIDDEN],
        lm_head: Some(matrix(random, VOCAB, HIDDEN, 2.0)),
    };
    let head = head(random);
    Arc::new(CpuModel::new(spec, weights, Some(Arc::new(head))))
}
