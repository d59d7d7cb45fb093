//! Select: join ranking and working set, promote completed tail blocks, plan admissions.

use crate::ids::{BlockId, KvHead, LayerId, RequestId, SlotId, Step};
use crate::memory::{LayerCache, Resident, Summaries};
use crate::pipeline::link::LinkMeter;
use crate::pipeline::stage::{Queue, Stage, StageError, guarded};
use crate::pipeline::transfer::{TransferMember, TransferMessage, TransferTask};
use crate::pipeline::{SelectTask, Tracer, Track};
use crate::policy::{SelectBatch, SelectRequest, Selector};
use crate::working_set::{Admission, Ranking, TransferPlan};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// A layer's ranking, with the summaries on their way home.
pub(super) struct RankedTask {
    pub layer: LayerId,
    pub members: Vec<(RequestId, Summaries)>,
    pub ranking: Result<Ranking, StageError>,
}

pub(super) enum SelectMessage {
    Ranked(RankedTask),
    Resident(SelectTask),
}

pub(super) struct SelectStage {
    kv_heads: usize,
    cap: usize,
    selector: Box<dyn Selector>,
    tracer: Tracer,
    next: Queue<TransferMessage>,
    link: Arc<LinkMeter>,
    /// Layers of which one half has arrived.
    waiting: HashMap<LayerId, SelectMessage>,
}

impl SelectStage {
    pub fn new(
        kv_heads: usize,
        budget: usize,
        selector: Box<dyn Selector>,
        tracer: Tracer,
        next: Queue<TransferMessage>,
        link: Arc<LinkMeter>,
    ) -> Self {
        let cap = selector.cap(budget).min(budget);
        Self { kv_heads, cap, selector, tracer, next, link, waiting: HashMap::new() }
    }

    /// Takes one half of a layer's work; `true` when it was the second and the layer was planned.
    pub fn run(&mut self, message: SelectMessage) -> bool {
        let layer = match &message {
            SelectMessage::Ranked(task) => task.layer,
            SelectMessage::Resident(task) => task.layer,
        };
        match (self.waiting.remove(&layer), message) {
            (Some(SelectMessage::Ranked(ranked)), SelectMessage::Resident(resident))
            | (Some(SelectMessage::Resident(resident)), SelectMessage::Ranked(ranked)) => {
                self.join(ranked, resident);
                true
            }
            (_, message) => {
                self.waiting.insert(layer, message);
                false
            }
        }
    }

    fn join(&mut self, ranked: RankedTask, resident: SelectTask) {
        let start = Instant::now();
        let SelectTask { layer, step, members } = resident;
        let mut members: Vec<TransferMember> = (ranked.members.into_iter().zip(members))
            .map(|((request, summaries), resident)| TransferMember::new(request, LayerCache { summaries, resident }))
            .collect();
        let ranking = match ranked.ranking {
            Ok(ranking) => {
                if let Err(error) = self.plan(layer, step, &ranking, &mut members) {
                    fail(&mut members, &error);
                }
                ranking
            }
            Err(error) => {
                fail(&mut members, &error);
                Ranking::new(members.len(), self.kv_heads)
            }
        };
        self.tracer.record(Track::Select, "select", layer, step, start);
        self.next.send(TransferMessage::Transfer(TransferTask { layer, step, ranking, members }));
    }

    fn plan(
        &mut self,
        layer: LayerId,
        step: Step,
        want: &Ranking,
        members: &mut [TransferMember],
    ) -> Result<(), StageError> {
        let mut fill = TransferPlan::new(members.len(), self.kv_heads);
        for (index, member) in members.iter_mut().enumerate() {
            let resident = &mut member.cache.resident;
            if resident.set.is_empty() {
                member.is_fill = true;
                fill.fill(index, want, &resident.set);
                apply(&fill, index, step, resident, &mut member.admissions);
            }
            for head in (0..self.kv_heads).map(KvHead::from) {
                resident.set.touch(head, want.wanted(index, head), step);
            }
            if resident.tail.is_full() {
                let block = resident.tail.block();
                for head in (0..self.kv_heads).map(KvHead::from) {
                    if let Some(slot) = promote(resident, head, block, want, index, step) {
                        member.promotions.push((head, slot));
                    }
                }
            }
        }

        self.link.selecting(layer, step, Instant::now());
        let link = self.link.rate();
        let mut plan = TransferPlan::new(members.len(), self.kv_heads);
        guarded(Stage::Select, || {
            let requests: Vec<_> = members.iter().map(|m| SelectRequest { have: &m.cache.resident.set }).collect();
            self.selector.plan(&SelectBatch { layer, want, requests: &requests, link }, &mut plan);
        })?;
        for (index, member) in members.iter_mut().enumerate() {
            plan.check(index, want, &member.cache.resident.set, self.cap)?;
            apply(&plan, index, step, &mut member.cache.resident, &mut member.admissions);
            member.deferred = count_missing(want, index, &member.cache.resident);
        }
        Ok(())
    }
}

/// Gives a completed tail block its slot, unless it was placed there by a first fill already.
fn promote(
    resident: &mut Resident,
    head: KvHead,
    block: BlockId,
    want: &Ranking,
    request: usize,
    step: Step,
) -> Option<SlotId> {
    if resident.set.head(head).contains(block) {
        return None;
    }
    let slot = resident.set.promotion_slot(head, want.wanted(request, head))?;
    resident.set.place(head, Admission { block, slot }, step);
    Some(slot)
}

fn apply(
    plan: &TransferPlan,
    request: usize,
    step: Step,
    resident: &mut Resident,
    admissions: &mut Vec<(KvHead, Admission)>,
) {
    for head in (0..plan.kv_heads()).map(KvHead::from) {
        for &admission in plan.head(request, head) {
            resident.set.place(head, admission, step);
            admissions.push((head, admission));
        }
    }
}

fn count_missing(want: &Ranking, request: usize, resident: &Resident) -> usize {
    let missing = |head: KvHead| {
        let residents = resident.set.head(head).residents();
        want.head(request, head).iter().filter(|w| !residents.contains(w.block)).count()
    };
    (0..want.kv_heads()).map(|head| missing(KvHead::from(head))).sum()
}

fn fail(members: &mut [TransferMember], error: &StageError) {
    for member in members {
        member.error = Some(error.clone());
    }
}
