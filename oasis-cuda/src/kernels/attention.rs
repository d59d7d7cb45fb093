//! Decode attention over slots, or over the pages of a dense cache.

use super::{Address, KernelParams, KernelSpec, file, unit};
use crate::compile::Unit;
use crate::layout::entry_bytes;

/// Shape of decode attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Query heads of a KV head: 1 to 16.
    pub group: usize,
    /// Query tokens of a request: 1, or 2 with a draft token.
    pub queries: usize,
    /// Whether entries are found by page; else they are the slots, one run a (request, KV head).
    pub paged: bool,
    /// Entries in flight per warp; 2 keep the memory busy and leave room for a gather beside it.
    pub stages: usize,
}

impl Attention {
    /// Bytes of [`AttentionParams::partial`] for launches of up to `ctas` CTAs.
    pub fn partial_bytes(&self, ctas: u32) -> usize {
        let part = self.group * self.queries * (self.head_dim + 2) * 4;
        ctas as usize * 2 * part.next_multiple_of(16)
    }

    /// `AttentionParams::scale` for the usual `1 / sqrt(head_dim)`.
    pub fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt()
    }
}

/// Parameters of decode attention.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AttentionParams {
    /// bf16 `[requests][queries][kv_heads * group][head_dim]`.
    pub q: Address,
    /// Slots `[requests][kv_heads][slots]` entries, or pages `[pages][kv_heads]` entries.
    pub entries: Address,
    /// Paged: i32 `[requests][slots]`, page of each block.
    pub pages: Address,
    /// `[requests][kv_heads][2]` entries, block `b` at `b % 2`; paged: none where the tail has pages too.
    pub tail: Address,
    /// i32 `[requests + 1]`: entries of a KV head, tail included, before each request.
    pub start: Address,
    /// i32 `[requests]`: position of the first query token.
    pub position: Address,
    /// bf16, as `q`; rows of requests without entries are left alone.
    pub out: Address,
    /// Scratch of [`Attention::partial_bytes`].
    pub partial: Address,
    /// u32 `[requests][kv_heads]`, zero between launches.
    pub arrived: Address,
    /// Requests.
    pub requests: i32,
    /// KV heads.
    pub kv_heads: i32,
    /// Slots of a KV head; paged: most blocks of a request.
    pub slots: i32,
    /// `log2(e)` times the scale of the scores.
    pub scale: f32,
}

// SAFETY: the fields are those of `Params` in attention.cu.
unsafe impl KernelParams for AttentionParams {}

impl KernelSpec for Attention {
    type Params = AttentionParams;
    const ENTRY: &'static str = "decode_attention";

    fn unit(&self) -> Unit {
        let Self { head_dim, group, queries, stages, paged } = *self;
        let defines = [
            ("HEAD_DIM", head_dim),
            ("GROUP", group),
            ("QUERIES", queries),
            ("STAGES", stages),
            ("PAGED", usize::from(paged)),
        ];
        unit(file!("attention.cu"), &defines)
    }

    fn threads(&self) -> u32 {
        128
    }

    fn shared_bytes(&self) -> usize {
        let merge = 4 * 8 * (self.head_dim + 8) * 4 + 2 * 4 * 8 * 4;
        4 * self.stages * entry_bytes(self.head_dim) + merge
    }
}
