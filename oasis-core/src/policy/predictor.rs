//! Predictions: which blocks the next step will want.

use super::{Aggregate, ScoreTask, SpecError, Summarizer};
use crate::geometry::HeadShape;
use crate::ids::{KvHead, LayerId};
use crate::memory::Summaries;
use crate::working_set::{Ranking, top_k};
use serde::{Deserialize, Serialize};

/// Whose query a predictor ranks blocks by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QuerySource {
    /// The draft token's query, computed beside the normal token: a prediction for the next step.
    Draft,
    /// The normal token's query of this step, taken as a prediction for the next step.
    Current,
    /// The normal token's query of this step, before its own attention: selection and transfer are waited for.
    Exact,
    /// What the normal token's query of this step would be if the layer had the input of the layer before: selection
    /// and transfer run beside that layer, and are waited for. The first sparse layer uses its own query, as with `Exact`.
    PreviousLayer,
}

/// When a choice that was made ahead is made again, by the very query that will attend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Correction {
    /// Cosine similarity of a KV head's queries in adjacent steps, mean over the group, below which it is.
    pub min_similarity: f32,
}

impl Correction {
    /// Whether the queries of any KV head have turned away from those of the step before, `[kv_heads][group][head_dim]`
    /// each. Queries without a direction, zero or NaN, have.
    pub fn is_due(self, shape: HeadShape, before: &[f32], now: &[f32]) -> bool {
        let group = shape.group * shape.head_dim;
        (before.chunks_exact(group).zip(now.chunks_exact(group))).any(|(before, now)| {
            let heads = before.chunks_exact(shape.head_dim).zip(now.chunks_exact(shape.head_dim));
            let similarity = heads.map(|(a, b)| cosine(a, b)).sum::<f32>() / shape.group as f32;
            similarity.is_nan() || similarity < self.min_similarity
        })
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(x, y)| x * y).sum() };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Blocks at both ends of the context that are wanted whatever their score.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// First blocks.
    pub sinks: usize,
    /// Last complete blocks.
    pub recent: usize,
}

impl Kept {
    /// Raises the kept ones of one head's `scores`, `[blocks]`, above all others. Where the budget has no room for all,
    /// sinks come first and the oldest recent blocks go without. Device kernels must reproduce it.
    pub fn raise(self, budget: usize, scores: &mut [f32]) {
        let sinks = self.sinks.min(budget).min(scores.len());
        let recent = self.recent.min(budget - sinks).min(scores.len() - sinks);
        if sinks + recent == 0 {
            return;
        }
        let others = sinks..scores.len() - recent;
        // Only kept blocks are infinite: an infinite score of a lower block would win the tie.
        scores[others.clone()].iter_mut().filter(|score| **score == f32::INFINITY).for_each(|score| *score = f32::MAX);
        scores[..others.start].fill(f32::INFINITY);
        scores[others.end..].fill(f32::INFINITY);
    }

    /// Whether they leave no room for others.
    pub fn fill(self, budget: usize) -> bool {
        self.sinks.saturating_add(self.recent) >= budget
    }
}

/// Seed of scores that are a hash, for a choice at random that is the same in every executor with the same queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashSeed(pub u64);

impl HashSeed {
    /// The seed of one layer.
    pub fn of_layer(self, layer: LayerId) -> u64 {
        mix(self.0 ^ mix(u64::from(layer.0)))
    }

    /// Writes the scores of one head's blocks, `[blocks]`, which depend on the bits of its `query`, `[group][head_dim]`.
    /// Device kernels must reproduce it.
    pub fn score(self, layer: LayerId, head: KvHead, query: &[f32], scores: &mut [f32]) {
        let start = mix(self.of_layer(layer) ^ head.index() as u64);
        let start = query.iter().fold(start, |hash, q| mix(hash ^ u64::from(q.to_bits())));
        for (block, score) in (0..).zip(scores) {
            // Of 24 bits each, so that a float holds them exactly.
            *score = (mix(start ^ block) >> 40) as f32;
        }
    }
}

/// One step of the generator that `x` is the state of.
fn mix(mut x: u64) -> u64 {
    split_mix64(&mut x)
}

/// The next number of a SplitMix64 generator (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
pub fn split_mix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Where the scores of a ranking come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreSource {
    /// The summarizer; the scores of a group are joined.
    Summaries(Aggregate),
    /// A hash.
    Hash(HashSeed),
}

/// A ranking by score that a device can make by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreRanking {
    /// Where the scores come from.
    pub scores: ScoreSource,
    /// Blocks that come before all others.
    pub kept: Kept,
}

/// One request's part of a prediction.
pub struct PredictRequest<'a> {
    /// Query of the chosen source after RoPE, `[kv_heads][group][head_dim]`.
    pub query: &'a [f32],
    /// Summaries of the request's blocks in this layer.
    pub summaries: &'a Summaries,
    /// Blocks that may be ranked: `0 .. blocks` are complete when the predicted step runs.
    pub blocks: usize,
}

/// A prediction for one layer and the whole batch.
pub struct PredictBatch<'a> {
    /// Layer.
    pub layer: LayerId,
    /// Shape of a KV head.
    pub shape: HeadShape,
    /// Blocks wanted per KV head, K.
    pub budget: usize,
    /// Scores queries against summaries.
    pub summarizer: &'a dyn Summarizer,
    /// Requests of the batch.
    pub requests: &'a [PredictRequest<'a>],
}

/// Ranks the blocks that the next step will want.
///
/// Obligations: for every request and KV head, `ranking` receives at most K distinct blocks below
/// [`PredictRequest::blocks`], best first; all of them when there are no more than K.
pub trait Predictor: Send {
    /// Whose query the ranking is made with.
    fn query_source(&self) -> QuerySource;

    /// The ranking, where it is one that a device can make by itself: the K best scores after [`Kept::raise`], made once a
    /// layer and step with the query of [`query_source`](Predictor::query_source), and once more where a
    /// [`correction`](Predictor::correction) is due.
    fn by_score(&self) -> Option<ScoreRanking> {
        None
    }

    /// When a choice by [`QuerySource::Current`] is made again before attention; `None` is never.
    fn correction(&self) -> Option<Correction> {
        None
    }

    /// Ranks blocks for one layer of the whole batch. `ranking` arrives empty, shaped for the batch.
    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking);
}

/// Configuration of a [`Predictor`], found by its `kind`.
#[typetag::serde(tag = "kind")]
pub trait PredictorSpec: std::fmt::Debug + Send + Sync {
    /// Builds the predictor.
    ///
    /// # Errors
    /// Names the field that has an impossible value.
    fn build(&self) -> Result<Box<dyn Predictor>, SpecError>;
}

/// The usual prediction: score every block, keep the K best of each KV head.
///
/// `scores` is scratch, kept by the caller between calls.
pub fn rank_by_score(batch: &PredictBatch<'_>, aggregate: Aggregate, scores: &mut Vec<f32>, ranking: &mut Ranking) {
    rank_adjusted(batch, aggregate, scores, |_| (), ranking);
}

/// As [`rank_by_score`], with the scores of each KV head, `[blocks]`, passed through `adjust` before they are ranked.
pub fn rank_adjusted(
    batch: &PredictBatch<'_>,
    aggregate: Aggregate,
    scores: &mut Vec<f32>,
    mut adjust: impl FnMut(&mut [f32]),
    ranking: &mut Ranking,
) {
    let heads = ranking.kv_heads();
    let query_elements = batch.shape.group * batch.shape.head_dim;
    scores.clear();
    scores.resize(batch.requests.iter().map(|r| heads * r.blocks).sum(), 0.0);

    let mut rest = scores.as_mut_slice();
    let mut tasks = Vec::with_capacity(batch.requests.len() * heads);
    for request in batch.requests {
        for head in 0..heads {
            let (scores, tail) = rest.split_at_mut(request.blocks);
            rest = tail;
            tasks.push(ScoreTask {
                query: &request.query[head * query_elements..][..query_elements],
                summaries: request.summaries.head(KvHead::from(head), request.blocks),
                scores,
            });
        }
    }
    batch.summarizer.score(batch.shape, aggregate, &mut tasks);

    let mut rest = scores.as_mut_slice();
    for (index, request) in batch.requests.iter().enumerate() {
        for head in 0..heads {
            let (scores, tail) = rest.split_at_mut(request.blocks);
            rest = tail;
            adjust(scores);
            ranking.set(index, KvHead::from(head), top_k(scores, batch.budget));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_corrected_when_any_head_turns_away() {
        let shape = HeadShape { group: 2, head_dim: 2, block_tokens: 1 };
        let correction = Correction { min_similarity: 0.6 };
        let before = [1.0, 0.0, 1.0, 0.0, /* head 1 */ 0.0, 2.0, 0.0, 2.0];
        // Length plays no part.
        assert!(!correction.is_due(shape, &before, &before.map(|q| 3.0 * q)));
        // Half of a group's queries at a right angle: the mean is 0.5.
        let mut now = before;
        now[6..].copy_from_slice(&[2.0, 0.0]);
        assert!(correction.is_due(shape, &before, &now));
        assert!(!Correction { min_similarity: 0.4 }.is_due(shape, &before, &now));
        now[6..].copy_from_slice(&[0.0, 0.0]);
        assert!(correction.is_due(shape, &before, &now));
    }
}
