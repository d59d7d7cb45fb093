//! Scores that are a hash, for choices at random.

use super::{Address, KernelParams, KernelSpec, file, unit};
use crate::compile::Unit;

/// Shape of the scores that [`HashSeed`](oasis_core::policy::HashSeed) gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashScores {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Query heads of a KV head: 1 to 16.
    pub group: usize,
    /// Query tokens of a request.
    pub queries: usize,
    /// The one that is hashed.
    pub query: usize,
}

/// Parameters of [`HashScores`]; the grid is `[requests][kv_heads]`, KV heads fastest.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct HashScoresParams {
    /// bf16 `[requests][queries][kv_heads * group][head_dim]`.
    pub q: Address,
    /// i32 `[requests]`: complete blocks.
    pub blocks: Address,
    /// f32 `[requests][kv_heads][stride]`; places beyond the last block are left alone.
    pub scores: Address,
    /// [`HashSeed::of_layer`](oasis_core::policy::HashSeed::of_layer).
    pub seed: u64,
    /// KV heads.
    pub kv_heads: i32,
    /// Scores of a KV head, at least as many as it has blocks.
    pub stride: i32,
}

// SAFETY: the fields are those of `Params` in hash_scores.cu.
unsafe impl KernelParams for HashScoresParams {}

impl KernelSpec for HashScores {
    type Params = HashScoresParams;
    const ENTRY: &'static str = "hash_scores";

    fn unit(&self) -> Unit {
        let Self { head_dim, group, queries, query } = *self;
        let defines = [("HEAD_DIM", head_dim), ("GROUP", group), ("QUERIES", queries), ("QUERY", query)];
        unit(file!("hash_scores.cu"), &defines)
    }

    fn threads(&self) -> u32 {
        256
    }
}
