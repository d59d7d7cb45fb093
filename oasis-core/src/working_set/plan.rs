//! Transfer plans: which store blocks go to which slots.

use crate::ids::{BlockId, KvHead, SlotId};
use crate::working_set::{BlockSet, Ranking, WorkingSet};

/// A store block that enters a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// Block to fetch.
    pub block: BlockId,
    /// Slot it goes to; what was there is dropped from the device.
    pub slot: SlotId,
}

/// Admissions of one layer for every request of a batch and every KV head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferPlan {
    kv_heads: usize,
    /// `[requests][kv_heads]`
    heads: Vec<Vec<Admission>>,
}

/// A plan that breaks the selector's obligations.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("request {request} of the batch, KV head {head}: {problem}")]
pub struct PlanError {
    /// Index of the request in the batch.
    pub request: usize,
    /// KV head.
    pub head: KvHead,
    /// Which obligation is broken, with the numbers.
    pub problem: String,
}

impl TransferPlan {
    /// An empty plan for `requests` requests of `kv_heads` KV heads.
    pub fn new(requests: usize, kv_heads: usize) -> Self {
        Self { kv_heads, heads: vec![Vec::new(); requests * kv_heads] }
    }

    /// KV heads of a request.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Admissions of one head.
    pub fn head(&self, request: usize, head: KvHead) -> &[Admission] {
        &self.heads[request * self.kv_heads + head.index()]
    }

    /// Adds an admission.
    pub fn push(&mut self, request: usize, head: KvHead, admission: Admission) {
        self.heads[request * self.kv_heads + head.index()].push(admission);
    }

    /// Admissions in the whole plan.
    pub fn len(&self) -> usize {
        self.heads.iter().map(Vec::len).sum()
    }

    /// Whether nothing is admitted.
    pub fn is_empty(&self) -> bool {
        self.heads.iter().all(Vec::is_empty)
    }

    /// Fills an empty working set with the best of `want`, not limited by any cap: the first working set of a request.
    pub fn fill(&mut self, request: usize, want: &Ranking, have: &WorkingSet) {
        for head in (0..self.kv_heads).map(KvHead::from) {
            for (slot, wanted) in want.head(request, head).iter().take(have.slots()).enumerate() {
                self.push(request, head, Admission { block: wanted.block, slot: SlotId::from(slot) });
            }
        }
    }

    /// Checks the selector's obligations for one request.
    ///
    /// # Errors
    /// Names the first head and the obligation that is broken.
    pub fn check(&self, request: usize, want: &Ranking, have: &WorkingSet, cap: usize) -> Result<(), PlanError> {
        for head in (0..self.kv_heads).map(KvHead::from) {
            self.check_head(request, head, want, have, cap).map_err(|problem| PlanError { request, head, problem })?;
        }
        Ok(())
    }

    fn check_head(
        &self,
        request: usize,
        head: KvHead,
        want: &Ranking,
        have: &WorkingSet,
        cap: usize,
    ) -> Result<(), String> {
        let plan = self.head(request, head);
        let slots = have.head(head).blocks;
        let (wanted, resident) = (want.wanted(request, head), have.head(head).residents());
        let (mut admitted, mut taken) = (BlockSet::default(), vec![false; slots.len()]);
        if plan.len() > cap {
            return Err(format!("{} admissions, the cap is {cap}", plan.len()));
        }
        for &Admission { block, slot } in plan {
            if !wanted.contains(block) {
                return Err(format!("block {block} is admitted but not wanted"));
            }
            if resident.contains(block) {
                return Err(format!("block {block} is admitted but already resident"));
            }
            if slot.index() >= have.slots() {
                return Err(format!("slot {slot} of {} is named", have.slots()));
            }
            if let Some(victim) = slots[slot.index()].filter(|victim| wanted.contains(*victim)) {
                return Err(format!("slot {slot} is taken from block {victim}, which is wanted"));
            }
            if !admitted.insert(block) || std::mem::replace(&mut taken[slot.index()], true) {
                return Err(format!("block {block} or slot {slot} is named twice"));
            }
        }
        Ok(())
    }
}
