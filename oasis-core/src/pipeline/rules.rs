//! The rules of ranking and selection, for every executor: policies decide within them.

use crate::geometry::KvGeometry;
use crate::ids::{BlockId, KvHead, LayerId, SlotId, Step};
use crate::memory::Summaries;
use crate::pipeline::stage::{Stage, StageError, guarded};
use crate::policy::{
    LinkRate, PredictBatch, PredictRequest, Predictor, SelectBatch, SelectRequest, Selector, Summarizer,
};
use crate::working_set::{Admission, Ranking, TransferPlan, WorkingSet};

/// One request's part of a ranking.
pub struct RankMember<'a> {
    /// Query of the predictor's source, `[kv_heads][group][head_dim]`.
    pub query: &'a [f32],
    /// Keys of blocks that are complete and not summarised yet, `[kv_heads][blocks][block_tokens][head_dim]`: summarised
    /// first.
    pub completed_keys: Option<&'a [f32]>,
    /// The request's summaries in this layer.
    pub summaries: &'a mut Summaries,
}

/// Summarises blocks that were complete before the step; `keys` are theirs,
/// `[kv_heads][blocks][block_tokens][head_dim]`.
///
/// # Errors
/// [`StageError::Panicked`] when the summarizer panics.
pub fn summarize(
    geometry: &KvGeometry,
    summarizer: &dyn Summarizer,
    keys: &[f32],
    summaries: &mut Summaries,
) -> Result<(), StageError> {
    guarded(Stage::Predict, || append(geometry, summarizer, keys, summaries))
}

fn append(geometry: &KvGeometry, summarizer: &dyn Summarizer, keys: &[f32], summaries: &mut Summaries) {
    if !keys.is_empty() {
        summaries.append(geometry, summarizer, keys.chunks_exact(keys.len() / geometry.kv_heads));
    }
}

/// Summarises what the step completed and ranks all blocks.
///
/// # Errors
/// [`StageError::Panicked`] when a policy panics.
pub fn rank(
    geometry: &KvGeometry,
    budget: usize,
    layer: LayerId,
    summarizer: &dyn Summarizer,
    predictor: &mut dyn Predictor,
    members: &mut [RankMember<'_>],
) -> Result<Ranking, StageError> {
    guarded(Stage::Predict, || {
        for member in members.iter_mut() {
            append(geometry, summarizer, member.completed_keys.take().unwrap_or_default(), member.summaries);
        }
        let requests: Vec<PredictRequest<'_>> = (members.iter())
            .map(|m| PredictRequest { query: m.query, summaries: m.summaries, blocks: m.summaries.blocks() })
            .collect();
        let mut ranking = Ranking::new(requests.len(), geometry.kv_heads);
        let batch = PredictBatch { layer, shape: geometry.head_shape(), budget, summarizer, requests: &requests };
        predictor.predict(&batch, &mut ranking);
        ranking
    })
}

/// One request's part of a selection.
pub struct SelectMember<'a> {
    /// Its working set in the layer: brought up to date.
    pub set: &'a mut WorkingSet,
    /// The tail block that this step completed.
    pub completed: Option<BlockId>,
}

/// What a selection changed in one request's working set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selected {
    /// The admissions are a first working set, which no cap limits.
    pub is_fill: bool,
    /// Slots that the completed tail block goes to.
    pub promotions: Vec<(KvHead, SlotId)>,
    /// Blocks that enter.
    pub admissions: Vec<(KvHead, Admission)>,
    /// Wanted entries that are left outside.
    pub deferred: usize,
}

impl Selected {
    /// Takes out what the completed tail block itself gives to slots, where it is admitted by a first fill or promoted:
    /// it need not cross the link. What is left in `admissions` does.
    pub fn take_completed(&mut self, completed: BlockId) -> Vec<(KvHead, SlotId)> {
        let mut slots = self.promotions.clone();
        self.admissions.retain(|&(head, admission)| {
            let is_tail = admission.block == completed;
            if is_tail {
                slots.push((head, admission.slot));
            }
            !is_tail
        });
        slots
    }

    /// Admissions of a first working set.
    pub fn filled(&self) -> usize {
        if self.is_fill { self.admissions.len() } else { 0 }
    }

    /// Admissions of the selector.
    pub fn admitted(&self) -> usize {
        if self.is_fill { 0 } else { self.admissions.len() }
    }
}

/// Fills empty working sets, promotes completed tail blocks, asks `selector` for its plan, checks and applies it. `link`
/// is what was measured of the link.
///
/// # Errors
/// [`StageError`] when the selector panics or breaks its obligations: the working sets may be half updated then.
pub fn select(
    selector: &mut dyn Selector,
    cap: usize,
    layer: LayerId,
    step: Step,
    want: &Ranking,
    link: Option<LinkRate>,
    members: &mut [SelectMember<'_>],
) -> Result<Vec<Selected>, StageError> {
    let kv_heads = want.kv_heads();
    let mut fill = TransferPlan::new(members.len(), kv_heads);
    let mut selected = vec![Selected::default(); members.len()];
    for (index, (member, selected)) in members.iter_mut().zip(&mut selected).enumerate() {
        if member.set.is_empty() {
            selected.is_fill = true;
            fill.fill(index, want, member.set);
            apply(&fill, index, step, member.set, &mut selected.admissions);
        }
        for head in (0..kv_heads).map(KvHead::from) {
            member.set.touch(head, want.wanted(index, head), step);
        }
        let Some(block) = member.completed else { continue };
        for head in (0..kv_heads).map(KvHead::from) {
            if let Some(slot) = promote(member.set, head, block, want, index, step) {
                selected.promotions.push((head, slot));
            }
        }
    }

    let mut plan = TransferPlan::new(members.len(), kv_heads);
    guarded(Stage::Select, || {
        let requests: Vec<_> = members.iter().map(|member| SelectRequest { have: member.set }).collect();
        selector.plan(&SelectBatch { layer, want, requests: &requests, link }, &mut plan);
    })?;
    for (index, (member, selected)) in members.iter_mut().zip(&mut selected).enumerate() {
        plan.check(index, want, member.set, cap)?;
        apply(&plan, index, step, member.set, &mut selected.admissions);
        selected.deferred = count_missing(want, index, member.set);
    }
    Ok(selected)
}

/// Gives a completed tail block its slot, unless it was placed there by a first fill already.
fn promote(
    set: &mut WorkingSet,
    head: KvHead,
    block: BlockId,
    want: &Ranking,
    request: usize,
    step: Step,
) -> Option<SlotId> {
    if set.head(head).contains(block) {
        return None;
    }
    let slot = set.promotion_slot(head, want.wanted(request, head))?;
    set.place(head, Admission { block, slot }, step);
    Some(slot)
}

fn apply(
    plan: &TransferPlan,
    request: usize,
    step: Step,
    set: &mut WorkingSet,
    admissions: &mut Vec<(KvHead, Admission)>,
) {
    for head in (0..plan.kv_heads()).map(KvHead::from) {
        for &admission in plan.head(request, head) {
            set.place(head, admission, step);
            admissions.push((head, admission));
        }
    }
}

fn count_missing(want: &Ranking, request: usize, set: &WorkingSet) -> usize {
    let missing = |head: KvHead| {
        let residents = set.head(head).residents();
        want.head(request, head).iter().filter(|w| !residents.contains(w.block)).count()
    };
    (0..want.kv_heads()).map(|head| missing(KvHead::from(head))).sum()
}
