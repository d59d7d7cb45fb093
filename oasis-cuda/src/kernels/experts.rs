//! Mixture of experts: routing, and the linear layers of experts for few rows and for many.
//!
//! A *pair* is a row and one of its experts. Pairs are sorted by expert, then by row, on the device: nothing here needs
//! the host to know who is routed where.

use super::rowwise::kernel;
use super::{Address, KernelParams, KernelSpec, file, unit};
use crate::compile::Unit;

/// The experts of every row and their weights; `ctas(rows)` CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Experts, a multiple of 32.
    pub experts: usize,
    /// Experts of a row, at most 32.
    pub top: usize,
}

impl Route {
    /// CTAs for `rows` rows.
    pub fn ctas(&self, rows: usize) -> u32 {
        rows.div_ceil(4) as u32
    }
}

/// Parameters of [`Route`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RouteParams {
    /// f32 `[rows][experts]`.
    pub logits: Address,
    /// i32 `[rows / queries]`, below 0 for padding; none where there is no padding.
    pub position: Address,
    /// i32 `[rows][top]`. Written: rising within a row, -1 in padding.
    pub expert: Address,
    /// f32 `[rows][top]`. Written.
    pub weight: Address,
    /// Rows.
    pub rows: i32,
    /// Rows of a position.
    pub queries: i32,
    /// 1 where the weights of a row sum to 1, 0 where they are shares of all experts.
    pub normalize: i32,
}

kernel!(Route, RouteParams, "route.cu", "route_rows", |_| 128, |shape| vec![
    ("EXPERTS", shape.experts),
    ("TOP", shape.top)
]);

/// Sorts pairs by expert, then by row; one CTA an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SortPairs;

/// Parameters of [`SortPairs`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct SortPairsParams {
    /// i32 `[rows][top]`, -1 for none.
    pub expert: Address,
    /// i32 `[experts + 1]`. Written: pairs of lower experts.
    pub start: Address,
    /// i32 `[rows * top]`. Written in front: the row of each pair.
    pub pair_row: Address,
    /// i32 `[rows][top]`. Written: where the pair went, -1 for none.
    pub pair_at: Address,
    /// Rows.
    pub rows: i32,
    /// Experts of a row.
    pub top: i32,
}

kernel!(SortPairs, SortPairsParams, "worklist.cu", "sort_pairs", |_| 1024, |_| Vec::new());

/// A linear layer of every expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertLayer {
    /// Experts, a multiple of 32.
    pub experts: usize,
    /// Outputs of a pair.
    pub out: usize,
    /// Elements of a row of weights.
    pub inner: usize,
    /// Whether it gives `silu(gate) * up` of the rows of `x`, or plain outputs of one row of `x` a pair.
    pub gated: bool,
}

impl ExpertLayer {
    fn defines(&self) -> Vec<(&'static str, usize)> {
        vec![("EXPERTS", self.experts), ("OUT", self.out), ("INNER", self.inner), ("GATED", usize::from(self.gated))]
    }
}

/// [`ExpertLayer`] for few rows: the weights of each active expert are read once for up to 32 rows. `out` is a multiple
/// of 16, or of 32 where not gated, `inner` a multiple of 32. Plain outputs are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertStream(pub ExpertLayer);

impl ExpertStream {
    /// CTAs for at most `pairs` pairs.
    pub fn ctas(&self, pairs: usize) -> u32 {
        // Of the 4 warps of a CTA, all or 2 share a tile.
        let tile = if self.0.gated { 16 } else { 32 };
        let teams = if self.0.inner >= 1536 { 1 } else { 2 };
        (pairs.min(self.0.experts) * self.0.out.div_ceil(tile * teams)) as u32
    }
}

/// Parameters of [`ExpertStream`] and of [`ExpertTiles`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ExpertParams {
    /// bf16 `[rows][inner]`, or `[pairs][inner]` where not gated.
    pub x: Address,
    /// bf16 `[experts][2 * out][inner]`, the gates of an expert, then its ups; `[experts][out][inner]` where not gated.
    pub weights: Address,
    /// i32 `[experts + 1]`: pairs of lower experts.
    pub start: Address,
    /// i32 `[pairs]`: the row of each pair.
    pub pair_row: Address,
    /// `[pairs][out]`. Written.
    pub out: Address,
}

// SAFETY: both source files have these fields, all of them pointers.
unsafe impl KernelParams for ExpertParams {}

impl KernelSpec for ExpertStream {
    type Params = ExpertParams;
    const ENTRY: &'static str = "stream_experts";

    fn unit(&self) -> Unit {
        unit(file!("expert_stream.cu"), &self.0.defines())
    }

    fn threads(&self) -> u32 {
        128
    }
}

/// [`ExpertLayer`] for many rows, 128 pairs a tile. `out` is a multiple of 8, `inner` of 64 and at least 128. All outputs
/// are bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTiles(pub ExpertLayer);

impl ExpertTiles {
    /// CTAs for at most `pairs` pairs: one a multiprocessor, each of which takes several tiles.
    pub fn ctas(&self, pairs: usize, multiprocessors: u32) -> u32 {
        let columns = if self.0.gated { 128 } else { 256 };
        // Each active expert has one tile that may not be full.
        let tiles = pairs / 128 + pairs.min(self.0.experts);
        multiprocessors.min((tiles * self.0.out.div_ceil(columns)) as u32)
    }
}

impl KernelSpec for ExpertTiles {
    type Params = ExpertParams;
    const ENTRY: &'static str = "multiply_experts";

    fn unit(&self) -> Unit {
        unit(file!("expert_tiles.cu"), &self.0.defines())
    }

    fn threads(&self) -> u32 {
        256
    }

    fn shared_bytes(&self) -> usize {
        // Four stages of 64 elements of 128 pairs and 256 rows of weights, aligned to 1,024.
        4 * (128 + 256) * 128 + 1024
    }
}

/// Adds up what the experts of a row gave, weighted, in the order of their numbers; one CTA a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Combine {
    /// Experts of a row.
    pub top: usize,
    /// Whether the parts are bf16, as [`ExpertTiles`] gives them, or f32.
    pub narrow: bool,
}

/// Parameters of [`Combine`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct CombineParams {
    /// bf16 or f32 `[pairs][hidden]`.
    pub parts: Address,
    /// i32 `[rows][top]`, -1 for none.
    pub pair_at: Address,
    /// f32 `[rows][top]`.
    pub weight: Address,
    /// bf16 `[rows][hidden]`, what the sum is added to; may be `out`; none where there is nothing.
    pub base: Address,
    /// bf16 `[rows][hidden]`. Written.
    pub out: Address,
    /// Elements of a row, a multiple of 4.
    pub hidden: i32,
}

kernel!(Combine, CombineParams, "combine.cu", "combine_experts", |_| 256, |shape| vec![
    ("TOP", shape.top),
    ("NARROW", usize::from(shape.narrow))
]);
