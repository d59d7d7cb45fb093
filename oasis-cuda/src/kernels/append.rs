//! From a QKV product to queries, tail blocks and summaries.

use super::{Address, KernelParams, KernelSpec, file, unit_with_policy};
use crate::compile::{SourceFile, Unit};

/// Shape of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Append {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Query tokens of a request: 1, or 2 with a draft token.
    pub queries: usize,
    /// Device code of the summarizer.
    pub summarizer: SourceFile,
    /// Its rows per block.
    pub rows: usize,
}

impl Append {
    /// CTAs for `requests` requests of `q_heads` and `kv_heads` heads.
    pub fn ctas(&self, requests: usize, q_heads: usize, kv_heads: usize) -> u32 {
        (requests * self.queries * (q_heads + 2 * kv_heads)).div_ceil(4) as u32
    }
}

/// Parameters of an append.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AppendParams {
    /// bf16 `[requests * queries][q_heads + 2 * kv_heads][head_dim]`.
    pub qkv: Address,
    /// bf16 `[head_dim]`; none without query and key norms.
    pub q_norm: Address,
    /// bf16 `[head_dim]`.
    pub k_norm: Address,
    /// f32 pairs `[positions][head_dim / 2]`: cosine and sine.
    pub rotation: Address,
    /// i32 `[requests]`: position of the first query token; -1 for padding.
    pub position: Address,
    /// bf16 `[requests * queries][q_heads][head_dim]`. Written.
    pub q: Address,
    /// `[requests][kv_heads][2]` entries; block `b` lies at `b % 2`. Written.
    pub tail: Address,
    /// `[requests][kv_heads][max_tiles]` tiles; none where nothing is summarised. Written when a block is complete.
    pub summaries: Address,
    /// Requests.
    pub requests: i32,
    /// Query heads.
    pub q_heads: i32,
    /// KV heads.
    pub kv_heads: i32,
    /// Most tiles of a KV head.
    pub max_tiles: i32,
    /// Epsilon of the norms.
    pub eps: f32,
}

// SAFETY: the fields are those of `Params` in append.cu.
unsafe impl KernelParams for AppendParams {}

impl KernelSpec for Append {
    type Params = AppendParams;
    const ENTRY: &'static str = "append_tokens";

    fn unit(&self) -> Unit {
        let defines = [("HEAD_DIM", self.head_dim), ("QUERIES", self.queries)];
        unit_with_policy(file!("append.cu"), &defines, "SUMMARIZER", self.summarizer)
    }

    fn threads(&self) -> u32 {
        128
    }
}
