//! `last-query`: the present stands for the future.

use super::ScoreRanker;
use oasis_core::policy::{Aggregate, Kept, Predictor, PredictorSpec, QuerySource, SpecError};
use serde::{Deserialize, Serialize};

/// Ranks blocks by this step's query, taken as the next one's. Needs no draft head; the baseline that lookahead must
/// beat.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LastQuery {
    /// How the scores of the query heads that share a KV head become one.
    pub aggregate: Aggregate,
    /// First blocks of the context that are always wanted.
    pub sinks: usize,
    /// Last complete blocks of the context that are always wanted.
    pub recent: usize,
}

oasis_core::register! {
    kind: "last-query", about: "Ranks by this step's own query: needs no draft head, one step late", device_code: true,
    impl PredictorSpec for LastQuery {
        fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
            let kept = Kept { sinks: self.sinks, recent: self.recent };
            Ok(Box::new(ScoreRanker::new(QuerySource::Current, self.aggregate, kept)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_by_its_own_query() {
        assert_eq!(LastQuery::default().build().unwrap().query_source(), QuerySource::Current);
    }
}
