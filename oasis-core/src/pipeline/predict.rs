//! Predict: summarise blocks that this step completed, rank all blocks for the next one.

use crate::geometry::KvGeometry;
use crate::pipeline::rules::{self, RankMember};
use crate::pipeline::select::{RankedTask, SelectMessage};
use crate::pipeline::stage::{Queue, StageError};
use crate::pipeline::{PredictTask, Tracer, Track};
use crate::policy::{Predictor, Summarizer};
use crate::working_set::Ranking;
use std::sync::Arc;
use std::time::Instant;

pub(super) struct PredictStage {
    geometry: KvGeometry,
    budget: usize,
    summarizer: Arc<dyn Summarizer>,
    predictor: Box<dyn Predictor>,
    tracer: Tracer,
    next: Queue<SelectMessage>,
}

impl PredictStage {
    pub fn new(
        geometry: KvGeometry,
        budget: usize,
        summarizer: Arc<dyn Summarizer>,
        predictor: Box<dyn Predictor>,
        tracer: Tracer,
        next: Queue<SelectMessage>,
    ) -> Self {
        Self { geometry, budget, summarizer, predictor, tracer, next }
    }

    pub fn run(&mut self, mut task: PredictTask) -> bool {
        let start = Instant::now();
        let ranking = self.rank(&mut task);
        let (layer, step) = (task.layer, task.step);
        let members = task.members.into_iter().map(|member| (member.request, member.summaries)).collect();
        self.tracer.record(Track::Predict, "predict", layer, step, start);
        self.next.send(SelectMessage::Ranked(RankedTask { layer, members, ranking }));
        true
    }

    fn rank(&mut self, task: &mut PredictTask) -> Result<Ranking, StageError> {
        let mut members: Vec<RankMember<'_>> = (task.members.iter_mut())
            .map(|member| RankMember {
                query: &member.query,
                completed_keys: member.completed_keys.as_deref(),
                summaries: &mut member.summaries,
            })
            .collect();
        rules::rank(&self.geometry, self.budget, task.layer, &*self.summarizer, &mut *self.predictor, &mut members)
    }
}
