//! `random`: the floor that every prediction must beat.

use oasis_core::ids::KvHead;
use oasis_core::policy::{
    HashSeed, Kept, PredictBatch, Predictor, PredictorSpec, QuerySource, ScoreRanking, ScoreSource, SpecError,
};
use oasis_core::working_set::{Ranking, top_k};
use serde::{Deserialize, Serialize};

/// Wants K blocks at random, chosen anew for every layer, KV head and step.
///
/// The choice depends on nothing but the seed, the layer, the KV head and the bits of the query, which differ from step
/// to step: the same request gets the same blocks again, in whatever batch it runs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Random {
    /// Another seed gives other choices.
    pub seed: u64,
}

oasis_core::register! {
    kind: "random", about: "K random blocks, anew each step: the floor of quality", device_code: true,
    impl PredictorSpec for Random {
        fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
            Ok(Box::new(RandomRanker { seed: HashSeed(self.seed) }))
        }
    }
}

struct RandomRanker {
    seed: HashSeed,
}

impl Predictor for RandomRanker {
    fn query_source(&self) -> QuerySource {
        QuerySource::Current
    }

    fn by_score(&self) -> Option<ScoreRanking> {
        Some(ScoreRanking { scores: ScoreSource::Hash(self.seed), kept: Kept::default() })
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        let head_query = batch.shape.group * batch.shape.head_dim;
        for (index, request) in batch.requests.iter().enumerate() {
            let mut scores = vec![0.0; request.blocks];
            for (head, query) in request.query.chunks_exact(head_query).enumerate() {
                let head = KvHead::from(head);
                self.seed.score(batch.layer, head, query, &mut scores);
                ranking.set(index, head, top_k(&scores, batch.budget));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predictors::tests::rank_blocks;

    #[test]
    fn every_block_is_chosen_equally_often_and_each_query_chooses_anew() {
        let mut counts = [0; 20];
        for step in 0..2000 {
            let wanted = rank_blocks(&Random::default(), 20, 5, &[step as f32; 16]);
            assert_eq!(wanted, rank_blocks(&Random::default(), 20, 5, &[step as f32; 16]));
            wanted.into_iter().for_each(|block| counts[block] += 1);
        }
        // A binomial of 2000 draws at 1/4: six standard deviations are 116.
        assert!(counts.iter().all(|count| (384..=616).contains(count)), "{counts:?}");
        let with = |seed| rank_blocks(&Random { seed }, 1000, 5, &[0.5; 16]);
        assert_ne!(with(0), with(1));
    }
}
