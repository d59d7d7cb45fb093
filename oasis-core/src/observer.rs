//! Looking at decode steps from inside: audits and measurements of policies.

use crate::ids::{BlockId, KvHead, LayerId, RequestId, Step};
use crate::memory::{Resident, Summaries};
use crate::pipeline::Returned;
use crate::policy::LinkRate;
use crate::working_set::{Ranking, WorkingSet};
use std::borrow::Cow;

/// One layer of one request in a decode step.
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
    /// Blocks that this step's attention finds in slots; none in a request's first decode step, which sees the full KV.
    pub set: &'a WorkingSet,
    /// Entries of the slots and the tail; `None` where they are in memory that the host does not read.
    pub resident: Option<&'a Resident>,
    /// Keys that the host can read: those that are resident, or the full KV where slots are in other memory.
    pub keys: &'a dyn LayerKeys,
}

/// Keys of one layer of a request, without the token that the step runs.
pub trait LayerKeys {
    /// Keys of a KV head: of complete blocks in the order of blocks, `[block_tokens][head_dim]` each, then those of the
    /// tail, `[tokens][head_dim]`.
    fn of_head(&self, head: KvHead) -> Vec<Cow<'_, [f32]>>;
}

impl LayerKeys for Resident {
    fn of_head(&self, head: KvHead) -> Vec<Cow<'_, [f32]>> {
        let keys = self.geometry().block_tokens * self.geometry().head_dim;
        let blocks = self.in_block_order(head).into_iter().map(|(_, slot)| &self.slot(head, slot)[..keys]);
        blocks.chain([self.tail.keys(head)]).map(Cow::Borrowed).collect()
    }
}

/// What the stages have done with a layer.
pub struct SelectionView<'a> {
    /// Layer.
    pub layer: LayerId,
    /// Step.
    pub step: Step,
    /// What was wanted.
    pub ranking: &'a Ranking,
    /// What the selector was told of the link.
    pub link: Option<LinkRate>,
    /// Requests of the batch, in the order of the ranking.
    pub members: &'a [SelectionMember],
}

/// One request's part of a [`SelectionView`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectionMember {
    /// Request.
    pub request: RequestId,
    /// Blocks that were ranked.
    pub blocks: usize,
    /// Entries of a first working set, without that of a completed tail block: no cap limits them.
    pub filled: usize,
    /// Entries that the selector admitted.
    pub admitted: usize,
    /// Wanted entries that were left outside.
    pub deferred: usize,
    /// The tail block that was completed.
    pub completed: Option<BlockId>,
    /// Whether a stage failed: the working set may be anything then.
    pub failed: bool,
}

impl From<&Returned> for SelectionMember {
    fn from(returned: &Returned) -> Self {
        Self {
            request: returned.request,
            blocks: returned.cache.summaries.blocks(),
            filled: returned.filled,
            admitted: returned.admitted,
            deferred: returned.deferred,
            completed: returned.completed,
            failed: returned.error.is_some(),
        }
    }
}

/// Sees every layer of every request of every decode step. It runs in the foreground: what it costs, the step costs.
pub trait StepObserver: Send {
    /// Called once a request and layer of each step: before its attention, or soon after it where the device is not host
    /// memory.
    fn layer(&mut self, _view: &LayerView<'_>) {}

    /// Called when the stages are done with a layer: before its next selection, or when a request ends.
    fn selected(&mut self, _view: &SelectionView<'_>) {}

    /// Called when a request ends.
    fn release(&mut self, _request: RequestId) {}
}
