//! `infinigen`: the layer before predicts.

use super::ScoreRanker;
use oasis_core::policy::{Aggregate, Kept, Predictor, PredictorSpec, QuerySource, SpecError};
use serde::{Deserialize, Serialize};

/// Ranks a layer's blocks by its query as the input of the layer before would give it, so that selection and transfer
/// run beside the layer before (InfiniGen, arXiv 2406.19707: the inputs of consecutive layers are much alike).
///
/// Deviations: the whole query projection is used, where InfiniGen keeps a part of skewed query and key weights, so this
/// is the ceiling of its prediction; blocks are ranked by their summaries, where InfiniGen ranks tokens by partial keys;
/// the budget is K, not a threshold below the best score. The first layer chooses by its own query.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InfiniGen {
    /// How the scores of the query heads that share a KV head become one.
    pub aggregate: Aggregate,
    /// First blocks of the context that are always wanted.
    pub sinks: usize,
    /// Last complete blocks of the context that are always wanted.
    pub recent: usize,
}

oasis_core::register! {
    kind: "infinigen", about: "Ranks by the query that the input of the layer before would give: one layer ahead",
    device_code: true,
    impl PredictorSpec for InfiniGen {
        fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
            let kept = Kept { sinks: self.sinks, recent: self.recent };
            Ok(Box::new(ScoreRanker::new(QuerySource::PreviousLayer, self.aggregate, kept)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_by_its_own_query() {
        assert_eq!(InfiniGen::default().build().unwrap().query_source(), QuerySource::PreviousLayer);
    }
}
