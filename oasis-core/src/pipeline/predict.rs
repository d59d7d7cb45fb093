//! Predict: summarise blocks that this step completed, rank all blocks for the next one.

use crate::geometry::KvGeometry;
use crate::pipeline::select::{RankedTask, SelectMessage};
use crate::pipeline::stage::{Queue, Stage, guarded};
use crate::pipeline::{PredictTask, Tracer, Track};
use crate::policy::{PredictBatch, PredictRequest, Predictor, Summarizer};
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
        let ranking = guarded(Stage::Predict, || self.rank(&mut task));
        let (layer, step) = (task.layer, task.step);
        let members = task.members.into_iter().map(|member| (member.request, member.summaries)).collect();
        self.tracer.record(Track::Predict, "predict", layer, step, start);
        self.next.send(SelectMessage::Ranked(RankedTask { layer, members, ranking }));
        true
    }

    fn rank(&mut self, task: &mut PredictTask) -> Ranking {
        let block_elements = self.geometry.block_tokens * self.geometry.head_dim;
        for member in &mut task.members {
            if let Some(keys) = member.completed_keys.take() {
                member.summaries.append(&self.geometry, &*self.summarizer, keys.chunks_exact(block_elements));
            }
        }
        let requests: Vec<PredictRequest<'_>> = (task.members.iter())
            .map(|m| PredictRequest { query: &m.query, summaries: &m.summaries, blocks: m.summaries.blocks() })
            .collect();
        let mut ranking = Ranking::new(requests.len(), self.geometry.kv_heads);
        let batch = PredictBatch {
            layer: task.layer,
            shape: self.geometry.head_shape(),
            budget: self.budget,
            summarizer: &*self.summarizer,
            requests: &requests,
        };
        self.predictor.predict(&batch, &mut ranking);
        ranking
    }
}
