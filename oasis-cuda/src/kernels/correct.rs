//! Choices that are made again before attention.

use super::{Address, KernelParams, KernelSpec, file, unit};
use crate::compile::Unit;

/// Shape of what finds the requests for which a [`Correction`](oasis_core::policy::Correction) is due; one CTA a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Correct {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Query heads of a KV head: 1 to 16.
    pub group: usize,
}

/// Parameters of [`Correct`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct CorrectParams {
    /// bf16 `[requests][kv_heads * group][head_dim]`: queries of this step.
    pub q: Address,
    /// bf16, as `q`: those of the step before. Updated.
    pub kept: Address,
    /// i32 `[requests]`: position of this step's token; -1 for padding, whose queries are left alone.
    pub position: Address,
    /// i32 `[requests]`: what a selection takes for its [`position`](super::SelectParams::position); -1 for those that do
    /// not choose again. Written. None: queries are kept and nothing else is done.
    pub ranked: Address,
    /// i32 `[requests]`: complete blocks to be ranked; 0 for those that do not choose again. Written.
    pub blocks: Address,
    /// i32 `[requests + 1]`: summary tiles of a KV head before each request. Written.
    pub tile_start: Address,
    /// u32 `[1]`, zero between launches.
    pub arrived: Address,
    /// u64 `[1]`: requests that have chosen again, added up over all launches. Updated.
    pub corrected: Address,
    /// Requests.
    pub requests: i32,
    /// KV heads.
    pub kv_heads: i32,
    /// [`Correction::min_similarity`](oasis_core::policy::Correction::min_similarity).
    pub min_similarity: f32,
}

// SAFETY: the fields are those of `Params` in correct.cu.
unsafe impl KernelParams for CorrectParams {}

impl KernelSpec for Correct {
    type Params = CorrectParams;
    const ENTRY: &'static str = "find_corrections";

    fn unit(&self) -> Unit {
        unit(file!("correct.cu"), &[("HEAD_DIM", self.head_dim), ("GROUP", self.group)])
    }

    fn threads(&self) -> u32 {
        256
    }
}
