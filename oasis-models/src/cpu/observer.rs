//! Looking at a decode step from inside: audits and measurements of policies.

use oasis_core::ids::{LayerId, RequestId, Step};
use oasis_core::memory::{Resident, Summaries};
use oasis_core::pipeline::LayerDone;

/// One layer of one request, between its projections and its attention.
pub struct LayerView<'a> {
    /// Layer.
    pub layer: LayerId,
    /// Step.
    pub step: Step,
    /// Request.
    pub request: RequestId,
    /// Position of the normal token.
    pub position: usize,
    /// Queries of the normal row, then of the draft row and the probe rows where there are any:
    /// `[rows][kv_heads][group][head_dim]`.
    pub queries: &'a [f32],
    /// Whether row 1 is the draft token's.
    pub has_draft: bool,
    /// Summaries of the blocks that were complete before this step.
    pub summaries: &'a Summaries,
    /// Working set that attention is about to read; empty in a request's first decode step, which sees the full KV.
    pub resident: &'a Resident,
}

/// Sees every layer of every request of every decode step. It runs in the foreground: what it costs, the step costs.
pub trait StepObserver: Send {
    /// Called once a request and layer, before attention.
    fn layer(&mut self, _view: &LayerView<'_>) {}

    /// Called when the stages are done with a layer: before its next selection, or when a request ends.
    fn selected(&mut self, _done: &LayerDone) {}

    /// Called when a request ends.
    fn release(&mut self, _request: RequestId) {}
}
