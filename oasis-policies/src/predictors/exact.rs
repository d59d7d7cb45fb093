//! `exact`: no prediction.

use super::ScoreRanker;
use oasis_core::policy::{Aggregate, Kept, Predictor, PredictorSpec, QuerySource, SpecError};
use serde::{Deserialize, Serialize};

/// Ranks blocks by the query that is about to attend, so that selection and transfer stand in the way of its attention.
/// What a perfect predictor would choose, at the floor of speed. It is no ceiling of quality: the K best by their summaries
/// need not be the K that weigh most.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Exact {
    /// How the scores of the query heads that share a KV head become one.
    pub aggregate: Aggregate,
    /// First blocks of the context that are always wanted.
    pub sinks: usize,
    /// Last complete blocks of the context that are always wanted.
    pub recent: usize,
}

oasis_core::register! {
    kind: "exact", about: "Ranks by the very query that will attend: the step waits for selection and transfer", device_code: true,
    impl PredictorSpec for Exact {
        fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
            let kept = Kept { sinks: self.sinks, recent: self.recent };
            Ok(Box::new(ScoreRanker::new(QuerySource::Exact, self.aggregate, kept)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_by_its_own_query() {
        assert_eq!(Exact::default().build().unwrap().query_source(), QuerySource::Exact);
    }
}
