//! Agreement of predicted with exact choices of blocks, measured inside a decode step (paper, Fig. 6).

use crate::eval::observed::Observed;
use oasis_core::geometry::HeadShape;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId};
use oasis_core::memory::Summaries;
use oasis_core::observer::{LayerView, StepObserver};
use oasis_core::policy::{Aggregate, ScoreTask, Summarizer};
use oasis_core::working_set::top_k;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Whose query of the step before is compared with the normal token's query of this step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The draft token's: the lookahead.
    Draft,
    /// The draft token's, where it guessed the next token.
    DraftRight,
    /// The draft token's, where it did not.
    DraftWrong,
    /// The normal token's: temporal locality alone.
    Previous,
    /// A probe token's, in a draft row: with the true next token, what a head that is always right would give.
    Probe,
}

/// Share of the exact top-K that was predicted, per layer.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    layers: Vec<LayerTotals>,
    /// Whether the draft token of the step before was the next token, where the caller says so.
    pub guessed_right: bool,
}

#[derive(Debug, Clone, Default)]
struct LayerTotals {
    draft: f64,
    /// The part of `draft` and of `drafts` in which the draft token was right.
    right: f64,
    rights: usize,
    previous: f64,
    probe: f64,
    /// (request, KV head, step) triples: all, those with a draft row, those with a probe row.
    count: usize,
    drafts: usize,
    probes: usize,
}

impl Totals {
    /// Mean agreement of each layer, 0 to 1; `None` where nothing was measured.
    pub fn per_layer(&self, source: Source) -> Option<Vec<f64>> {
        let means = self.layers.iter().map(|layer| {
            let (sum, count) = match source {
                Source::Draft => (layer.draft, layer.drafts),
                Source::DraftRight => (layer.right, layer.rights),
                Source::DraftWrong => (layer.draft - layer.right, layer.drafts - layer.rights),
                Source::Previous => (layer.previous, layer.count),
                Source::Probe => (layer.probe, layer.probes),
            };
            (count > 0).then(|| sum / count as f64)
        });
        means.collect::<Option<Vec<f64>>>().filter(|means| !means.is_empty())
    }

    /// Mean over layers.
    pub fn mean(&self, source: Source) -> Option<f64> {
        self.per_layer(source).map(|layers| layers.iter().sum::<f64>() / layers.len() as f64)
    }

    /// Decode steps compared, over all requests.
    pub fn steps(&self, kv_heads: usize) -> usize {
        self.layers.first().map_or(0, |layer| layer.count / kv_heads)
    }
}

/// The choice that a query would make by itself.
pub struct Chooser {
    /// Scores.
    pub summarizer: Arc<dyn Summarizer>,
    /// Shape of a KV head.
    pub shape: HeadShape,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Blocks chosen, K.
    pub budget: usize,
    /// How the query heads of a group are joined.
    pub aggregate: Aggregate,
}

impl Chooser {
    /// That of an executor which decodes sparsely with K blocks.
    pub fn of(executor: &Observed<'_>, budget: usize, aggregate: Aggregate) -> Self {
        let geometry = executor.info().geometry;
        Self {
            summarizer: executor.summarizer.clone(),
            shape: geometry.head_shape(),
            kv_heads: geometry.kv_heads,
            budget,
            aggregate,
        }
    }

    /// Elements of one row's queries.
    pub fn row(&self) -> usize {
        self.kv_heads * self.shape.group * self.shape.head_dim
    }

    /// Top-K of one row's queries `[kv_heads][group][head_dim]`, sorted by block, per KV head.
    pub fn choose(&self, queries: &[f32], summaries: &Summaries) -> Vec<Vec<BlockId>> {
        let (blocks, group) = (summaries.blocks(), self.shape.group * self.shape.head_dim);
        let mut scores = vec![0.0; self.kv_heads * blocks];
        let mut tasks: Vec<ScoreTask<'_>> = (scores.chunks_exact_mut(blocks.max(1)).enumerate())
            .map(|(head, scores)| ScoreTask {
                query: &queries[head * group..][..group],
                summaries: summaries.head(KvHead::from(head), blocks),
                scores,
            })
            .collect();
        self.summarizer.score(self.shape, self.aggregate, &mut tasks);
        let chosen = scores.chunks_exact(blocks.max(1)).map(|scores| {
            let mut chosen: Vec<BlockId> = top_k(scores, self.budget).iter().map(|ranked| ranked.block).collect();
            chosen.sort_unstable();
            chosen
        });
        chosen.collect()
    }
}

/// Compares the choice that the queries of one step would make for the next with what the next step's own query
/// chooses, over the blocks that are complete by then. The queries of a step are kept until then, so that a block that
/// was completed in between is ranked by both.
pub struct AgreementMeter {
    chooser: Chooser,
    /// Queries of the step before, with whether row 1 was a draft row.
    before: HashMap<(RequestId, LayerId), (Vec<f32>, bool)>,
    totals: Arc<Mutex<Totals>>,
}

impl AgreementMeter {
    /// A meter for `layers` layers, and a handle to what it measures.
    pub fn new(chooser: Chooser, layers: usize) -> (Self, Arc<Mutex<Totals>>) {
        let totals =
            Arc::new(Mutex::new(Totals { layers: vec![LayerTotals::default(); layers], guessed_right: false }));
        (Self { chooser, before: HashMap::new(), totals: totals.clone() }, totals)
    }
}

impl StepObserver for AgreementMeter {
    fn layer(&mut self, view: &LayerView<'_>) {
        let (row, kv_heads) = (self.chooser.row(), self.chooser.kv_heads);
        let key = (view.request, view.layer);
        let before = self.before.insert(key, (view.queries.to_vec(), view.has_draft));
        // With no more blocks than the budget every choice is the same.
        let Some((before, drafted)) = before.filter(|_| view.summaries.blocks() > self.chooser.budget) else { return };
        let exact = self.chooser.choose(&view.queries[..row], view.summaries);
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        let guessed_right = totals.guessed_right;
        let layer = &mut totals.layers[view.layer.index()];
        layer.count += kv_heads;
        for (index, queries) in before.chunks_exact(row).enumerate() {
            let agreement: f64 = (self.chooser.choose(queries, view.summaries).iter().zip(&exact))
                .map(|(predicted, exact)| share(predicted, exact))
                .sum();
            match index {
                0 => layer.previous += agreement,
                1 if drafted => {
                    layer.draft += agreement;
                    layer.drafts += kv_heads;
                    if guessed_right {
                        layer.right += agreement;
                        layer.rights += kv_heads;
                    }
                }
                _ => {
                    layer.probe += agreement;
                    layer.probes += kv_heads;
                }
            }
        }
    }

    fn release(&mut self, request: RequestId) {
        self.before.retain(|(owner, _), _| *owner != request);
    }
}

/// Share of `exact` that is in `predicted`; both sorted.
pub fn share(predicted: &[BlockId], exact: &[BlockId]) -> f64 {
    exact.iter().filter(|block| predicted.binary_search(block).is_ok()).count() as f64 / exact.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_counts_the_predicted_part_of_the_exact_set() {
        let blocks = |ids: &[u32]| ids.iter().map(|&id| BlockId(id)).collect::<Vec<_>>();
        assert_eq!(share(&blocks(&[1, 3, 5, 7]), &blocks(&[1, 2, 3, 4])), 0.5);
        assert_eq!(share(&blocks(&[]), &blocks(&[])), 0.0);
    }
}
