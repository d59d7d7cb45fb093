//! `freekv`: the step before predicts, and a query that has turned away is answered at once.

use super::ScoreRanker;
use oasis_core::policy::{Aggregate, Correction, Kept, Predictor, PredictorSpec, QuerySource, SpecError};
use serde::{Deserialize, Serialize};

/// Ranks by this step's query for the next step, as [`LastQuery`](super::LastQuery) does. Where a KV head's next query
/// turns out to be less similar than `min_similarity` (cosine, mean over the group), that layer chooses again by its own
/// query and waits for the transfer before it attends (FreeKV, arXiv 2505.13109: speculative retrieval with
/// fine-grained correction).
///
/// Use it with the `quest` summarizer and the `fetch-all` selector. Deviations: one head that turns away corrects all
/// KV heads of its request and layer, not itself alone; scores of a group are summed, not pooled after a softmax; page
/// layouts and streamed recall are matters of the transport.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FreeKv {
    /// How the scores of the query heads that share a KV head become one.
    pub aggregate: Aggregate,
    /// First blocks of the context that are always wanted.
    pub sinks: usize,
    /// Last complete blocks of the context that are always wanted.
    pub recent: usize,
    /// Cosine similarity of adjacent queries below which the choice is corrected, -1 to 1.
    pub min_similarity: f64,
}

impl Default for FreeKv {
    fn default() -> Self {
        Self { aggregate: Aggregate::Sum, sinks: 0, recent: 0, min_similarity: 0.9 }
    }
}

oasis_core::register! {
    kind: "freekv", about: "Ranks by the step before; corrects at once where the query has turned away",
    device_code: true,
    impl PredictorSpec for FreeKv {
        fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
            let min_similarity = self.min_similarity;
            if !(-1.0..=1.0).contains(&min_similarity) {
                return Err(SpecError::new("min_similarity", "a number from -1 to 1", min_similarity)
                    .hint("it is a cosine: -1 never corrects, 1 almost always does"));
            }
            let kept = Kept { sinks: self.sinks, recent: self.recent };
            let mut ranker = ScoreRanker::new(QuerySource::Current, self.aggregate, kept);
            ranker.correction = Some(Correction { min_similarity: min_similarity as f32 });
            Ok(Box::new(ranker))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_by_its_own_query_and_says_when_to_correct() {
        let predictor = FreeKv { min_similarity: 0.5, ..FreeKv::default() }.build().unwrap();
        assert_eq!(predictor.query_source(), QuerySource::Current);
        assert_eq!(predictor.correction(), Some(Correction { min_similarity: 0.5 }));
    }

    #[test]
    fn an_impossible_similarity_is_named_with_a_hint() {
        for min_similarity in [-1.1, 1.1, f64::NAN] {
            let error = FreeKv { min_similarity, ..FreeKv::default() }.build().err().expect("no cosine is so large");
            assert_eq!(error.field, "min_similarity");
            assert!(error.hint.is_some());
        }
    }
}
