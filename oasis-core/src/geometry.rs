//! Shapes and sizes of the KV cache.

use serde::{Deserialize, Serialize};

/// Number of the entry layout that stores, transports and peers must agree on.
///
/// Version 1: an entry is `K[block_tokens][head_dim]` then `V[block_tokens][head_dim]`, row-major, little-endian.
pub const LAYOUT_VERSION: u32 = 1;

/// Element type of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// 32-bit float: what the CPU executor keeps.
    F32,
    /// 16-bit brain float.
    Bf16,
}

impl KvDtype {
    /// Size of one element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Shape of a model's KV cache, cut into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvGeometry {
    /// Decoder layers.
    pub layers: usize,
    /// Query heads of a layer; a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key/value heads of a layer.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Element type.
    pub dtype: KvDtype,
}

impl KvGeometry {
    /// Query heads that share one KV head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Elements of one entry: keys and values of one block and one KV head.
    pub fn entry_elements(&self) -> usize {
        2 * self.block_tokens * self.head_dim
    }

    /// Bytes of one entry.
    pub fn entry_bytes(&self) -> usize {
        self.entry_elements() * self.dtype.bytes()
    }

    /// Bytes of one block of one layer, all KV heads.
    pub fn block_bytes(&self) -> usize {
        self.kv_heads * self.entry_bytes()
    }

    /// Blocks that `tokens` tokens fill completely.
    pub fn full_blocks(&self, tokens: usize) -> usize {
        tokens / self.block_tokens
    }

    /// First of `tokens` positions that lies in their newest `blocks` blocks, an incomplete one counted; 0 for `None`, all of
    /// them.
    pub fn window_start(&self, tokens: usize, blocks: Option<usize>) -> usize {
        blocks.map_or(0, |blocks| tokens.div_ceil(self.block_tokens).saturating_sub(blocks) * self.block_tokens)
    }

    /// Bytes of the KV of `tokens` tokens in all layers, as a dense cache would hold them.
    pub fn dense_bytes(&self, tokens: usize) -> u64 {
        (self.layers * self.kv_heads * tokens * 2 * self.head_dim * self.dtype.bytes()) as u64
    }

    /// What one KV head of this geometry looks like to a policy.
    pub fn head_shape(&self) -> HeadShape {
        HeadShape { group: self.group(), head_dim: self.head_dim, block_tokens: self.block_tokens }
    }
}

/// Shape of one KV head, for policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads that share the KV head.
    pub group: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Tokens of one block.
    pub block_tokens: usize,
}

/// Device memory of a request's KV cache, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvFootprint {
    /// Slots of the working sets, tail blocks and draft scratch, all layers and heads.
    pub working_set: u64,
    /// Summary rows of every block, all layers and heads.
    pub summaries: u64,
    /// KV of the draft head.
    pub draft: u64,
    /// Full KV of the one layer that a prefill is in.
    pub prefill: u64,
}

impl KvFootprint {
    /// Sum of all parts.
    pub fn total(&self) -> u64 {
        self.working_set + self.summaries + self.draft + self.prefill
    }
}

impl std::ops::AddAssign for KvFootprint {
    fn add_assign(&mut self, other: Self) {
        self.working_set += other.working_set;
        self.summaries += other.summaries;
        self.draft += other.draft;
        self.prefill += other.prefill;
    }
}

impl std::ops::SubAssign for KvFootprint {
    fn sub_assign(&mut self, other: Self) {
        self.working_set -= other.working_set;
        self.summaries -= other.summaries;
        self.draft -= other.draft;
        self.prefill -= other.prefill;
    }
}
