//! Select: join ranking and working set, promote completed tail blocks, plan admissions.

use crate::ids::{LayerId, RequestId, Step};
use crate::memory::{LayerCache, Resident, Summaries};
use crate::pipeline::link::LinkMeter;
use crate::pipeline::rules::{self, SelectMember};
use crate::pipeline::stage::{Queue, StageError};
use crate::pipeline::transfer::{TransferMember, TransferMessage, TransferTask};
use crate::pipeline::{SelectTask, Tracer, Track};
use crate::policy::{LinkRate, Selector};
use crate::working_set::Ranking;
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
        self.link.selecting(layer, step, Instant::now());
        let link = self.link.rate();
        let ranking = match ranked.ranking {
            Ok(ranking) => {
                if let Err(error) = self.plan(layer, step, &ranking, link, &mut members) {
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
        self.next.send(TransferMessage::Transfer(TransferTask { layer, step, ranking, link, members }));
    }

    fn plan(
        &mut self,
        layer: LayerId,
        step: Step,
        want: &Ranking,
        link: Option<LinkRate>,
        members: &mut [TransferMember],
    ) -> Result<(), StageError> {
        let mut parts: Vec<SelectMember<'_>> = (members.iter_mut())
            .map(|member| {
                let Resident { set, tail, .. } = &mut member.cache.resident;
                SelectMember { set, completed: tail.is_full().then(|| tail.block()) }
            })
            .collect();
        let selected = rules::select(&mut *self.selector, self.cap, layer, step, want, link, &mut parts)?;
        for (member, selected) in members.iter_mut().zip(selected) {
            member.selected = selected;
        }
        Ok(())
    }
}

fn fail(members: &mut [TransferMember], error: &StageError) {
    for member in members {
        member.error = Some(error.clone());
    }
}
