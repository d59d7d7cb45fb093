//! From a QKV product to queries, blocks and summaries: of a decode step, and of a prompt.

use super::{Address, KernelParams, KernelSpec, file, unit_with_policy};
use crate::compile::Unit;
use oasis_core::policy::DeviceCode;

/// Shape of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Append {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Query tokens of a request: 1, or 2 with a draft token.
    pub queries: usize,
    /// Device code of the summarizer.
    pub summarizer: DeviceCode,
    /// Bytes of a block's summary.
    pub bytes: usize,
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
    /// `[requests][kv_heads][2]` entries, block `b` at `b % 2`; with pages, `[pages][kv_heads]` entries. Written.
    pub tail: Address,
    /// i32 `[requests][page_stride]`: page of each block; none where the current block lies in a tail.
    pub pages: Address,
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
    /// Pages of a request.
    pub page_stride: i32,
    /// Epsilon of the norms.
    pub eps: f32,
}

// SAFETY: the fields are those of `Params` in append.cu.
unsafe impl KernelParams for AppendParams {}

impl KernelSpec for Append {
    type Params = AppendParams;
    const ENTRY: &'static str = "append_tokens";
    const WAITS: bool = true;

    fn unit(&self) -> Unit {
        let defines = [("HEAD_DIM", self.head_dim), ("QUERIES", self.queries), ("SUMMARY_BYTES", self.bytes)];
        unit_with_policy(file!("append.cu"), &defines, "SUMMARIZER", self.summarizer)
    }

    fn threads(&self) -> u32 {
        128
    }
}

/// Shape of the append of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppendPrompt {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Device code of the summarizer.
    pub summarizer: DeviceCode,
    /// Bytes of a block's summary.
    pub bytes: usize,
}

/// Parameters of [`AppendPrompt`]; the grid is `[q_heads + kv_heads][blocks of the chunk]`, blocks fastest.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AppendPromptParams {
    /// bf16 `[tokens][q_heads + 2 * kv_heads][head_dim]`. Queries and keys are updated in place.
    pub qkv: Address,
    /// bf16 `[head_dim]`; none without query and key norms.
    pub q_norm: Address,
    /// bf16 `[head_dim]`.
    pub k_norm: Address,
    /// f32 pairs `[positions][head_dim / 2]`: cosine and sine.
    pub rotation: Address,
    /// `[blocks][kv_heads]` entries; with pages, `[pages][kv_heads]`. Written, the valid part of the last block too.
    pub entries: Address,
    /// i32 `[blocks]`: page of each block; none where block `b` is number `b`.
    pub pages: Address,
    /// `[kv_heads][2]` entries: receives the prompt's last block at its number `% 2`; none where it is not kept apart.
    pub tail: Address,
    /// `[kv_heads][max_tiles]` tiles; none where nothing is summarised. Written for complete blocks.
    pub summaries: Address,
    /// Tokens of the chunk.
    pub tokens: i32,
    /// First token of the chunk whose queries are wanted; those of the tokens before it are left alone.
    pub first_query: i32,
    /// Query heads.
    pub q_heads: i32,
    /// KV heads.
    pub kv_heads: i32,
    /// Most tiles of a KV head.
    pub max_tiles: i32,
    /// Block of the chunk's first token; a chunk begins with a block.
    pub first_block: i32,
    /// Block of the prompt's last token.
    pub last_block: i32,
    /// Epsilon of the norms.
    pub eps: f32,
}

// SAFETY: the fields are those of `Params` in append_prompt.cu.
unsafe impl KernelParams for AppendPromptParams {}

impl KernelSpec for AppendPrompt {
    type Params = AppendPromptParams;
    const ENTRY: &'static str = "append_prompt";

    fn unit(&self) -> Unit {
        let defines = [("HEAD_DIM", self.head_dim), ("SUMMARY_BYTES", self.bytes)];
        unit_with_policy(file!("append_prompt.cu"), &defines, "SUMMARIZER", self.summarizer)
    }

    fn threads(&self) -> u32 {
        128
    }
}
