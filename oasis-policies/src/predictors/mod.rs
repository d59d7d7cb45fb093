//! Predictors: whose query the blocks of the next step are ranked by, and which blocks are wanted whatever their score.

mod draft_query;
mod exact;
mod freekv;
mod infinigen;
mod last_query;
mod random;
mod streaming_llm;

pub use draft_query::DraftQuery;
pub use exact::Exact;
pub use freekv::FreeKv;
pub use infinigen::InfiniGen;
pub use last_query::LastQuery;
pub use random::Random;
pub use streaming_llm::StreamingLlm;

use oasis_core::policy::{
    Aggregate, Correction, Kept, PredictBatch, Predictor, QuerySource, ScoreRanking, ScoreSource, rank_adjusted,
};
use oasis_core::working_set::Ranking;

/// Ranks every block by its score, the kept ones first; the kinds differ in the query they are given.
struct ScoreRanker {
    source: QuerySource,
    correction: Option<Correction>,
    aggregate: Aggregate,
    kept: Kept,
    /// Scratch.
    scores: Vec<f32>,
}

impl ScoreRanker {
    fn new(source: QuerySource, aggregate: Aggregate, kept: Kept) -> Self {
        Self { source, correction: None, aggregate, kept, scores: Vec::new() }
    }
}

impl Predictor for ScoreRanker {
    fn query_source(&self) -> QuerySource {
        self.source
    }

    fn by_score(&self) -> Option<ScoreRanking> {
        Some(ScoreRanking { scores: ScoreSource::Summaries(self.aggregate), kept: self.kept })
    }

    fn correction(&self) -> Option<Correction> {
        self.correction
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        let (kept, budget) = (self.kept, batch.budget);
        rank_adjusted(batch, self.aggregate, &mut self.scores, |scores| kept.raise(budget, scores), ranking);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::geometry::{KvDtype, KvGeometry};
    use oasis_core::ids::{KvHead, LayerId};
    use oasis_core::memory::Summaries;
    use oasis_core::policy::{PredictRequest, PredictorSpec};
    use oasis_core::testkit::doubles::FirstKey;
    use oasis_core::working_set::top_k;
    use quickcheck::quickcheck;

    /// Blocks that a predictor wants among `blocks` blocks of zeros, by a query `[head_dim]`.
    pub(super) fn rank_blocks(spec: &dyn PredictorSpec, blocks: usize, budget: usize, query: &[f32]) -> Vec<usize> {
        let geometry = KvGeometry {
            layers: 1,
            q_heads: 1,
            kv_heads: 1,
            head_dim: query.len(),
            block_tokens: 1,
            dtype: KvDtype::F32,
        };
        let mut summaries = Summaries::new(&geometry, &FirstKey, blocks);
        summaries.append(&geometry, &FirstKey, [vec![0.0; blocks * query.len()].as_slice()]);
        let batch = PredictBatch {
            layer: LayerId(0),
            shape: geometry.head_shape(),
            budget,
            summarizer: &FirstKey,
            requests: &[PredictRequest { query, summaries: &summaries, blocks }],
        };
        let mut ranking = Ranking::new(1, 1);
        spec.build().unwrap().predict(&batch, &mut ranking);
        ranking.head(0, KvHead(0)).iter().map(|ranked| ranked.block.index()).collect()
    }

    fn wanted(kept: Kept, budget: usize, mut scores: Vec<f32>) -> Vec<usize> {
        kept.raise(budget, &mut scores);
        top_k(&scores, budget).iter().map(|ranked| ranked.block.index()).collect()
    }

    #[test]
    fn kept_blocks_come_first_and_the_best_of_the_others_follow() {
        let scores = vec![0.1, 0.2, f32::INFINITY, f32::NAN, 0.9, 0.3, f32::NEG_INFINITY];
        assert_eq!(wanted(Kept { sinks: 1, recent: 1 }, 4, scores.clone()), [0, 6, 2, 4]);
        assert_eq!(wanted(Kept { sinks: 0, recent: 0 }, 2, scores.clone()), [2, 4]);
        assert_eq!(wanted(Kept { sinks: 2, recent: 9 }, 3, scores.clone()), [0, 1, 6]);
        assert_eq!(wanted(Kept { sinks: 9, recent: 9 }, 3, scores), [0, 1, 2]);
    }

    quickcheck! {
        fn the_ends_of_any_context_are_kept(scores: Vec<f32>, sinks: u8, recent: u8, spare: u8) -> bool {
            let (blocks, sinks, recent) = (scores.len(), sinks as usize % 9, recent as usize % 9);
            let wanted = wanted(Kept { sinks, recent }, sinks + recent + spare as usize % 9, scores);
            let is_kept = |block: &usize| *block < sinks || block + recent >= blocks;
            (0..blocks).filter(is_kept).all(|block| wanted.contains(&block))
        }
    }
}
