//! `draft-query`: lookahead by the draft token.

use super::ScoreRanker;
use oasis_core::policy::{Aggregate, Kept, Predictor, PredictorSpec, QuerySource, SpecError};
use serde::{Deserialize, Serialize};

/// Ranks blocks by the query of the draft token, which runs beside the normal one: its query is close to that of the
/// step to come, whose blocks can so be fetched while this step still computes (the
/// paper's look-ahead prediction).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DraftQuery {
    /// How the scores of the query heads that share a KV head become one.
    pub aggregate: Aggregate,
    /// First blocks of the context that are always wanted.
    pub sinks: usize,
    /// Last complete blocks of the context that are always wanted.
    pub recent: usize,
}

oasis_core::register! {
    kind: "draft-query", about: "Ranks by the draft token's query: lookahead, hidden behind the step", device_code: true,
    impl PredictorSpec for DraftQuery {
        fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
            let kept = Kept { sinks: self.sinks, recent: self.recent };
            Ok(Box::new(ScoreRanker::new(QuerySource::Draft, self.aggregate, kept)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_by_its_own_query() {
        assert_eq!(DraftQuery::default().build().unwrap().query_source(), QuerySource::Draft);
    }
}
