//! Conformance of predictors.

use super::doubles::FirstKey;
use super::{Random, for_all};
use crate::geometry::{KvDtype, KvGeometry};
use crate::ids::{BlockId, KvHead, LayerId};
use crate::memory::Summaries;
use crate::policy::{PredictBatch, PredictRequest, Predictor, PredictorSpec};
use crate::working_set::{RankedBlock, Ranking};
use std::collections::HashSet;

/// Checks the obligations of [`Predictor`]: at most K distinct blocks in range, best first, all of them when there are
/// no more than K; deterministic; a request's ranking does not depend on the rest of its batch. Blocks may be none, few
/// or many, and scores may be NaN.
///
/// # Panics
/// When an obligation is broken.
pub fn conforms(spec: &dyn PredictorSpec) {
    for_all(100, |random| {
        let geometry = KvGeometry {
            layers: 1,
            q_heads: 4,
            kv_heads: 2,
            head_dim: 8,
            block_tokens: random.pick(&[1, 4]),
            dtype: KvDtype::F32,
        };
        let requests: Vec<Request> = (0..random.within(1, 3)).map(|_| Request::random(random, geometry)).collect();
        let budget = random.pick(&[1, 2, 5, 40]);
        let mut predictor = spec.build().unwrap_or_else(|error| panic!("{spec:?} does not build: {error}"));

        let all: Vec<&Request> = requests.iter().collect();
        let ranking = predict(&mut *predictor, geometry, budget, &all);
        assert!(ranking == predict(&mut *predictor, geometry, budget, &all) || has_nan(&ranking), "not deterministic");
        for (index, request) in requests.iter().enumerate() {
            let alone = predict(&mut *predictor, geometry, budget, &[request]);
            for head in (0..geometry.kv_heads).map(KvHead::from) {
                let ranked = ranking.head(index, head);
                check(ranked, request.blocks, budget);
                assert_eq!(blocks(alone.head(0, head)), blocks(ranked), "the ranking depends on the rest of the batch");
            }
        }
        predict(&mut *predictor, geometry, budget, &[]);
    });
}

struct Request {
    query: Vec<f32>,
    summaries: Summaries,
    blocks: usize,
}

impl Request {
    fn random(random: &mut Random, geometry: KvGeometry) -> Self {
        let summarised = random.below(12);
        let elements = summarised * geometry.block_tokens * geometry.head_dim;
        let mut keys: Vec<Vec<f32>> = (0..geometry.kv_heads).map(|_| random.floats(elements)).collect();
        if random.one_in(3) && elements > 0 {
            keys[0][random.below(elements)] = f32::NAN;
        }
        let mut summaries = Summaries::new(&geometry, &FirstKey, summarised);
        summaries.append(&geometry, &FirstKey, keys.iter().map(Vec::as_slice));
        let query = random.floats(geometry.q_heads * geometry.head_dim);
        // The last block may not be complete when the predicted step runs.
        Self { query, summaries, blocks: summarised - random.below(2).min(summarised) }
    }
}

fn predict(predictor: &mut dyn Predictor, geometry: KvGeometry, budget: usize, requests: &[&Request]) -> Ranking {
    let requests: Vec<PredictRequest<'_>> = (requests.iter())
        .map(|r| PredictRequest { query: &r.query, summaries: &r.summaries, blocks: r.blocks })
        .collect();
    let mut ranking = Ranking::new(requests.len(), geometry.kv_heads);
    let batch = PredictBatch {
        layer: LayerId(0),
        shape: geometry.head_shape(),
        budget,
        summarizer: &FirstKey,
        requests: &requests,
    };
    predictor.predict(&batch, &mut ranking);
    ranking
}

fn check(ranked: &[RankedBlock], available: usize, budget: usize) {
    let distinct: HashSet<BlockId> = ranked.iter().map(|r| r.block).collect();
    assert_eq!(distinct.len(), ranked.len(), "a block is ranked twice: {ranked:?}");
    assert!(ranked.iter().all(|r| r.block.index() < available), "a block is not among the {available}: {ranked:?}");
    assert!(ranked.len() <= budget, "{} blocks are wanted, the budget is {budget}", ranked.len());
    if available <= budget {
        assert_eq!(ranked.len(), available, "all blocks fit the budget of {budget} and are wanted");
    }
    for pair in ranked.windows(2) {
        let in_order = pair[0].score >= pair[1].score || pair[1].score.is_nan();
        assert!(in_order, "not best first: {ranked:?}");
    }
}

fn blocks(ranked: &[RankedBlock]) -> Vec<BlockId> {
    ranked.iter().map(|r| r.block).collect()
}

fn has_nan(ranking: &Ranking) -> bool {
    let heads = (0..ranking.requests()).flat_map(|r| (0..ranking.kv_heads()).map(move |h| (r, KvHead::from(h))));
    heads.into_iter().any(|(r, h)| ranking.head(r, h).iter().any(|block| block.score.is_nan()))
}
