//! Weights of a decoder as the executors read them: row-major matrices in their stored precision, projections fused.

use half::bf16;

/// A row-major matrix `[rows][cols]`; a linear layer computes `y[rows] = W x[cols]`.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// `rows * cols` elements, row after row.
    pub data: MatrixData,
}

/// Elements of a [`Matrix`] in the precision they are kept in.
#[derive(Debug, Clone)]
pub enum MatrixData {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// Brain floats: half the memory traffic of a decode step, exact for checkpoints stored in bf16.
    Bf16(Vec<bf16>),
}

impl Matrix {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        (match &self.data {
            MatrixData::F32(data) => size_of_val(data.as_slice()),
            MatrixData::Bf16(data) => size_of_val(data.as_slice()),
        }) as u64
    }
}

/// Weights of a whole decoder.
#[derive(Debug, Clone)]
pub struct DecoderWeights {
    /// Token embedding `[vocab][hidden]`.
    pub embed: Matrix,
    /// One entry a layer, in order.
    pub layers: Vec<LayerWeights>,
    /// Final RMSNorm `[hidden]`.
    pub norm: Vec<f32>,
    /// Output projection `[vocab][hidden]`; `None` when tied to `embed`.
    pub lm_head: Option<Matrix>,
}

/// Weights of one decoder layer.
#[derive(Debug, Clone)]
pub struct LayerWeights {
    /// RMSNorm before attention `[hidden]`.
    pub input_norm: Vec<f32>,
    /// Attention projections.
    pub attention: AttentionWeights,
    /// RMSNorm before the MLP `[hidden]`.
    pub post_attention_norm: Vec<f32>,
    /// Dense MLP or mixture of experts.
    pub mlp: Mlp,
}

impl LayerWeights {
    /// Bytes of all matrices.
    pub fn matrix_bytes(&self) -> u64 {
        let mlp = |mlp: &GatedMlp| mlp.gate_up.bytes() + mlp.down.bytes();
        let feed_forward = match &self.mlp {
            Mlp::Dense(dense) => mlp(dense),
            Mlp::Moe { router, experts } => router.bytes() + experts.iter().map(mlp).sum::<u64>(),
        };
        self.attention.qkv.bytes() + self.attention.o.bytes() + feed_forward
    }
}

/// Attention projections; query rows first, then key rows, then value rows. Q and K rows are in Hugging Face
/// (rotate-half) order whatever the file's order was.
#[derive(Debug, Clone)]
pub struct AttentionWeights {
    /// `[(q_heads + 2 * kv_heads) * head_dim][in]`.
    pub qkv: Matrix,
    /// `[(q_heads + 2 * kv_heads) * head_dim]`, where the family has biases.
    pub qkv_bias: Option<Vec<f32>>,
    /// Per-head RMSNorm of queries `[head_dim]` (Qwen3).
    pub q_norm: Option<Vec<f32>>,
    /// Per-head RMSNorm of keys `[head_dim]` (Qwen3).
    pub k_norm: Option<Vec<f32>>,
    /// `[hidden][q_heads * head_dim]`.
    pub o: Matrix,
}

/// Feed-forward part of a layer.
#[derive(Debug, Clone)]
pub enum Mlp {
    /// `down(silu(gate x) * up x)`.
    Dense(GatedMlp),
    /// Top-k routed experts.
    Moe {
        /// Router `[experts][hidden]`.
        router: Matrix,
        /// One gated MLP an expert.
        experts: Vec<GatedMlp>,
    },
}

/// A SwiGLU feed-forward network.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    /// `[2 * intermediate][hidden]`: gate rows first, then up rows.
    pub gate_up: Matrix,
    /// `[hidden][intermediate]`.
    pub down: Matrix,
}
