//! EAGLE-3 draft heads in the public layout (SafeAILab/EAGLE `cnets.py`, SpecForge, SGLang).

use crate::spec::RopeSpec;
use crate::weights::{AttentionWeights, GatedMlp, Matrix};

/// Shape and arithmetic of an EAGLE-3 head.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Spec {
    /// Width of the head's residual stream.
    pub hidden: usize,
    /// Width of each tapped target vector; `fc` maps `3 * target_hidden` to `hidden`.
    pub target_hidden: usize,
    /// Inner width of the MLP.
    pub intermediate: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Rows of `lm_head`.
    pub draft_vocab: usize,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Rotary embedding of the head (not the target's).
    pub rope: RopeSpec,
    /// Target layers whose INPUT is tapped, low, mid, high; `None` means the default `(2, n/2, n-3)`.
    pub taps: Option<[usize; 3]>,
}

/// Weights of an EAGLE-3 head.
#[derive(Debug, Clone)]
pub struct Eagle3Weights {
    /// `[hidden][3 * target_hidden]`.
    pub fc: Matrix,
    /// RMSNorm of the embedding half `[hidden]`.
    pub input_norm: Vec<f32>,
    /// RMSNorm of the hidden-state half `[hidden]`.
    pub hidden_norm: Vec<f32>,
    /// Attention; `qkv` takes the `2 * hidden` wide concatenation.
    pub attention: AttentionWeights,
    /// RMSNorm before the MLP `[hidden]`.
    pub post_attention_norm: Vec<f32>,
    /// Feed-forward network.
    pub mlp: GatedMlp,
    /// RMSNorm before `lm_head` `[hidden]`.
    pub norm: Vec<f32>,
    /// `[draft_vocab][hidden]`.
    pub lm_head: Matrix,
    /// Draft id to target id, `draft_vocab` entries; `None` when both vocabularies are one.
    pub target_ids: Option<Vec<u32>>,
    /// Own token embedding `[vocab][hidden]`, only where `target_hidden != hidden`.
    pub embed: Option<Matrix>,
}

/// A loaded EAGLE-3 head.
#[derive(Debug, Clone)]
pub struct Eagle3Head {
    /// Shape and arithmetic.
    pub spec: Eagle3Spec,
    /// Weights.
    pub weights: Eagle3Weights,
}
