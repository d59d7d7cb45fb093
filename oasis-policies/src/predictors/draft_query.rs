//! `draft-query`: lookahead by the draft token.

use super::ScoreRanker;
use oasis_core::policy::{Aggregate, Predictor, PredictorSpec, QuerySource, SpecError};
use serde::{Deserialize, Serialize};

/// Ranks blocks by the query of the draft token, which runs beside the normal one: its query is close to that of the
/// step to come, whose blocks can so be fetched while this step still computes (the
/// paper's look-ahead prediction).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DraftQuery {
    /// How the scores of the query heads that share a KV head become one.
    pub aggregate: Aggregate,
}

oasis_core::register! {
    kind: "draft-query", about: "Ranks by the draft token's query: lookahead, hidden behind the step", device_code: false,
    impl PredictorSpec for DraftQuery {
        fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
            Ok(ScoreRanker::boxed(QuerySource::Draft, self.aggregate))
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
