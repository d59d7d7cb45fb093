//! The working set: which blocks of a (request, layer, KV head) are on the device, what is wanted next, and the plan
//! that leads from one to the other. Pure bookkeeping, no memory is moved here.

mod block_set;
mod plan;
mod ranking;
mod resident_set;

pub use block_set::BlockSet;
pub use plan::{Admission, PlanError, TransferPlan};
pub use ranking::{RankedBlock, Ranking, top_k};
pub use resident_set::{HeadSet, HeldSlot, WorkingSet};
