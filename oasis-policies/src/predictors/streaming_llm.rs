//! `streaming-llm`: attention sinks and a window of recent blocks.

use oasis_core::ids::KvHead;
use oasis_core::policy::{
    Aggregate, Kept, PredictBatch, Predictor, PredictorSpec, QuerySource, ScoreRanking, ScoreSource, SpecError,
};
use oasis_core::working_set::{Ranking, top_k};
use serde::{Deserialize, Serialize};

/// Wants the first `sinks` blocks and the newest ones up to K, whatever the query (StreamingLLM, arXiv 2309.17453,
/// section 3.2). New blocks come from the tail, so that nothing crosses the link after the first working set.
///
/// Deviations: sinks are whole blocks, not 4 tokens; kept keys stay at their own positions instead of moving up within
/// the cache; the first decode step sees the full KV, as with every predictor. Where the selector's cap is small, old
/// blocks of a first working set leave only as fast as the window moves.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StreamingLlm {
    /// First blocks of the context that are always wanted.
    pub sinks: usize,
}

impl Default for StreamingLlm {
    fn default() -> Self {
        Self { sinks: 1 }
    }
}

oasis_core::register! {
    kind: "streaming-llm", about: "Attention sinks and the newest blocks, whatever the query", device_code: true,
    impl PredictorSpec for StreamingLlm {
        fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
            Ok(Box::new(Window { kept: Kept { sinks: self.sinks, recent: usize::MAX } }))
        }
    }
}

struct Window {
    kept: Kept,
}

impl Predictor for Window {
    fn query_source(&self) -> QuerySource {
        QuerySource::Current
    }

    /// Kept blocks fill every budget, so that no score is ever asked for.
    fn by_score(&self) -> Option<ScoreRanking> {
        Some(ScoreRanking { scores: ScoreSource::Summaries(Aggregate::Sum), kept: self.kept })
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        for (index, request) in batch.requests.iter().enumerate() {
            let mut scores = vec![0.0; request.blocks];
            self.kept.raise(batch.budget, &mut scores);
            let window = top_k(&scores, batch.budget);
            for head in (0..ranking.kv_heads()).map(KvHead::from) {
                ranking.set(index, head, window.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predictors::tests::rank_blocks;

    #[test]
    fn wants_sinks_and_the_newest_blocks() {
        let wanted = |sinks, budget| rank_blocks(&StreamingLlm { sinks }, 20, budget, &[0.5; 16]);
        assert_eq!(wanted(1, 4), [0, 17, 18, 19]);
        assert_eq!(wanted(0, 2), [18, 19]);
        assert_eq!(wanted(5, 3), [0, 1, 2]);
        assert_eq!(wanted(1, 30), (0..20).collect::<Vec<_>>());
    }
}
