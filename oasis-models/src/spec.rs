//! What a decoder is, apart from its weights: one description for every supported family.

/// Shape and arithmetic of a decoder-only transformer (Llama, Qwen3, Qwen3-MoE).
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderSpec {
    /// `model_type` of the checkpoint, for messages ("llama", "qwen3", "qwen3_moe").
    pub family: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Query heads of a layer.
    pub q_heads: usize,
    /// Key/value heads of a layer; divides `q_heads`.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Inner width of a dense MLP.
    pub intermediate: usize,
    /// Vocabulary size (rows of the embedding).
    pub vocab: usize,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Longest context, in tokens, after RoPE scaling.
    pub max_positions: usize,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Output projection shares the embedding.
    pub tied_embeddings: bool,
    /// RMSNorm on each query and key head before RoPE (Qwen3).
    pub qk_norm: bool,
    /// Biases on the q, k and v projections.
    pub attention_bias: bool,
    /// Mixture of experts, where the family has it.
    pub moe: Option<MoeSpec>,
    /// Tokens that end a generation.
    pub eos: Vec<u32>,
    /// Token to put before a prompt, where the tokenizer's settings ask for one.
    pub bos: Option<u32>,
}

/// Routing of a mixture-of-experts family.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeSpec {
    /// Experts of a sparse layer.
    pub experts: usize,
    /// Experts that one token is routed to.
    pub experts_per_token: usize,
    /// Inner width of one expert.
    pub intermediate: usize,
    /// Divide the chosen routing weights by their sum.
    pub normalize: bool,
    /// `true` for each layer whose MLP is sparse, `layers` entries.
    pub sparse_layers: Vec<bool>,
}

/// Rotary position embedding, in Hugging Face's rotate-half order.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f32,
    /// Context extension.
    pub scaling: RopeScaling,
}

/// How RoPE frequencies are changed for longer contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Plain RoPE.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// Extension factor.
        factor: f32,
    },
    /// Llama 3.1's piecewise scaling.
    Llama3 {
        /// Extension factor.
        factor: f32,
        /// Wavelengths above `original_max_positions / low_freq_factor` are fully scaled.
        low_freq_factor: f32,
        /// Wavelengths below `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length the model was trained with.
        original_max_positions: usize,
    },
    /// YaRN (Peng et al., 2023).
    Yarn {
        /// Extension factor.
        factor: f32,
        /// Ramp end, in rotations.
        beta_fast: f32,
        /// Ramp start, in rotations.
        beta_slow: f32,
        /// Context length the model was trained with.
        original_max_positions: usize,
        /// Factor on cos and sin; `0.1 ln(factor) + 1` unless the checkpoint says otherwise.
        attention_factor: f32,
    },
}
