//! Mixtures of experts in steps and prefills.
//!
//! A router gives each row its experts; pairs of a row and an expert are sorted by expert. Few pairs an expert go by
//! [`ExpertStream`], which reads weights at the speed of the memory, many by [`ExpertTiles`], which multiplies at the speed
//! of the tensor cores. Parts of a row are added in the order of its experts' numbers.

use super::memory::Activations;
use super::mixture::ExpertMemory;
use super::parts::{Parts, Work};
use crate::device::DeviceError;
use crate::gemm::Output;
use crate::kernels::{
    Address, CombineParams, ExpertParams, ExpertStream, ExpertTiles, Route, RouteParams, SortPairsParams,
};
use crate::model::{DeviceExperts, FeedForward};

/// Rows that pass a mixture.
pub(super) struct Routed<'a> {
    pub memory: &'a ExpertMemory,
    pub layer: usize,
    pub rows: usize,
    /// Rows of the router's product, and rows that there is room for.
    pub product: (usize, usize),
    /// i32 `[rows / queries]`, below 0 for padding; none where there is no padding.
    pub position: Address,
    pub queries: usize,
    /// bf16 `[rows][hidden]`.
    pub x: Address,
    /// bf16 `[rows][hidden]`, what the experts' sum is added to; may be `out`; none where there is nothing.
    pub base: Address,
    /// bf16 `[rows][hidden]`. Written.
    pub out: Address,
}

impl Parts {
    /// Feed-forward part of a step's rows, from their norms to what is added to the residual.
    pub fn feed_forward(
        &self,
        work: &Work<'_>,
        activations: &Activations,
        (rows, layer): (usize, usize),
        position: Address,
    ) -> Result<(), DeviceError> {
        let experts = match &self.model.layers[layer].mlp {
            FeedForward::Dense(mlp) => return self.mlp(work, activations, rows, mlp),
            FeedForward::Experts(experts) => experts,
        };
        let memory = self.memory.experts.as_ref().expect("a model with experts has memory for them");
        let routed = Routed {
            memory,
            layer,
            rows,
            product: (rows, activations.rows),
            position,
            queries: self.extent.queries,
            x: activations.normed.address(),
            base: Address::NONE,
            out: activations.added.address(),
        };
        self.mixture(work, experts, &routed)
    }

    /// Routes rows to experts and adds up what they give.
    pub fn mixture(&self, work: &Work<'_>, experts: &DeviceExperts, routed: &Routed<'_>) -> Result<(), DeviceError> {
        let programs = self.programs.experts.as_ref().expect("a model with experts has kernels for them");
        let (Routed { memory, rows, .. }, shape) = (routed, programs.shape);
        let start = memory.start.address().offset(routed.layer * (shape.experts + 1) * 4);
        self.linear(work, routed.product, &experts.router, routed.x, memory.logits.address(), Output::F32)?;
        let route = RouteParams {
            logits: memory.logits.address(),
            position: routed.position,
            expert: memory.expert.address(),
            weight: memory.weight.address(),
            rows: *rows as i32,
            queries: routed.queries as i32,
            normalize: i32::from(shape.normalize),
        };
        let sort = SortPairsParams {
            expert: memory.expert.address(),
            start,
            pair_row: memory.pair_row.address(),
            pair_at: memory.pair_at.address(),
            rows: *rows as i32,
            top: shape.top as i32,
        };
        let ctas = Route { experts: shape.experts, top: shape.top }.ctas(*rows);
        // SAFETY: the memory has room for all rows and their pairs.
        unsafe {
            programs.route.launch(work.stream, (ctas, 1), &route)?;
            programs.sort.launch(work.stream, (shape.experts as u32, 1), &sort)?;
        }
        let (inner, parts) = (memory.inner.address(), memory.parts.address());
        let streamed = shape.streamed(*rows);
        let operands = [(routed.x, &experts.gate_up, inner), (inner, &experts.down, parts)];
        for (index, (x, weights, out)) in operands.into_iter().enumerate() {
            let (layer, pairs) = (shape.layers()[index], rows * shape.top);
            let params =
                ExpertParams { x, weights: weights.address(), start, pair_row: memory.pair_row.address(), out };
            // SAFETY: starts and rows of pairs were written above; `inner` and `parts` have room for all pairs.
            unsafe {
                if streamed {
                    let grid = (ExpertStream(layer).ctas(pairs), 1);
                    programs.stream[index].launch(work.stream, grid, &params)?;
                } else {
                    let grid = (ExpertTiles(layer).ctas(pairs, self.device.facts.multiprocessors), 1);
                    programs.tiles[index].launch(work.stream, grid, &params)?;
                }
            }
        }
        let combine = CombineParams {
            parts,
            pair_at: memory.pair_at.address(),
            weight: memory.weight.address(),
            base: routed.base,
            out: routed.out,
            hidden: shape.hidden as i32,
        };
        // SAFETY: callers give room for all rows; a row's CTA alone reads and writes it.
        unsafe { programs.combine[usize::from(!streamed)].launch(work.stream, (*rows as u32, 1), &combine) }
    }
}
