//! Selection: which wanted blocks are admitted, and which residents make room.

use super::{DeviceCode, SpecError};
use crate::ids::LayerId;
use crate::working_set::{Ranking, TransferPlan, WorkingSet};
use std::time::Duration;

/// One request's part of a selection.
pub struct SelectRequest<'a> {
    /// What is resident, after this step's promotion.
    pub have: &'a WorkingSet,
}

/// What the link has carried lately and how fast, both measured, with older values weighing less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkRate {
    /// Time that one entry takes, from the store to its slot, when several are fetched together.
    pub entry: Duration,
    /// Time from one layer's selection to the next one's within a step: the pipeline keeps up as long as a layer's
    /// transfer takes no longer (paper, section 4.2.2).
    pub interval: Duration,
}

/// A selection for one layer and the whole batch.
pub struct SelectBatch<'a> {
    /// Layer.
    pub layer: LayerId,
    /// What the predictor wants, best first, per request and KV head.
    pub want: &'a Ranking,
    /// Requests of the batch, in the ranking's order.
    pub requests: &'a [SelectRequest<'a>],
    /// How fast the link has been; `None` until something has been measured, and where nothing is.
    pub link: Option<LinkRate>,
}

/// Plans which wanted blocks enter the working set.
///
/// Obligations, checked after every call:
/// - per request and KV head at most [`cap`](Selector::cap) admissions, each a wanted block that is not resident, none twice;
/// - each admission takes a slot of its own that is free or holds a block that is not wanted.
///
/// A plan is pure: it depends on nothing but the arguments. Filling an empty working set after the first decode step
/// and promoting a completed tail block are rules of the working set, not of the selector.
pub trait Selector: Send {
    /// Most admissions a KV head and step, C, for a working set of `budget` slots.
    fn cap(&self, budget: usize) -> usize;

    /// Adds this step's admissions to `plan`, which arrives empty, shaped for the batch.
    fn plan(&mut self, batch: &SelectBatch<'_>, plan: &mut TransferPlan);

    /// The cap of one step, at most [`cap`](Selector::cap), for a working set of `budget` slots and `heads` KV heads of the
    /// whole batch together, where it follows the link. A device that selects by itself asks for it once a step, where
    /// [`plan`](Selector::plan) hears of the link in every layer. `None`, whatever the arguments, where the cap is constant.
    fn cap_by_link(&self, _budget: usize, _heads: usize, _link: Option<LinkRate>) -> Option<usize> {
        None
    }

    /// Device code with the same order of victims and admissions, where the policy brings it.
    fn device_code(&self) -> Option<DeviceCode> {
        None
    }
}

/// Configuration of a [`Selector`], found by its `kind`.
#[typetag::serde(tag = "kind")]
pub trait SelectorSpec: std::fmt::Debug + Send + Sync {
    /// Builds the selector.
    ///
    /// # Errors
    /// Names the field that has an impossible value.
    fn build(&self) -> Result<Box<dyn Selector>, SpecError>;
}
