//! `random`: the floor that every prediction must beat.

use oasis_core::ids::KvHead;
use oasis_core::policy::{PredictBatch, Predictor, PredictorSpec, QuerySource, SpecError};
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
    kind: "random", about: "K random blocks, anew each step: the floor of quality", device_code: false,
    impl PredictorSpec for Random {
        fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
            Ok(Box::new(RandomRanker { seed: self.seed }))
        }
    }
}

struct RandomRanker {
    seed: u64,
}

impl Predictor for RandomRanker {
    fn query_source(&self) -> QuerySource {
        QuerySource::Current
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        let head_query = batch.shape.group * batch.shape.head_dim;
        let seed = mix(self.seed ^ mix(u64::from(batch.layer.0)));
        for (index, request) in batch.requests.iter().enumerate() {
            for head in 0..ranking.kv_heads() {
                let query = &request.query[head * head_query..][..head_query];
                let start = query.iter().fold(mix(seed ^ head as u64), |hash, q| mix(hash ^ u64::from(q.to_bits())));
                // Of 24 bits each, so that a float holds them exactly.
                let scores: Vec<f32> =
                    (0..request.blocks).map(|block| (mix(start ^ block as u64) >> 40) as f32).collect();
                ranking.set(index, KvHead::from(head), top_k(&scores, batch.budget));
            }
        }
    }
}

/// SplitMix64: one step of the generator that `x` is the state of.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
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
