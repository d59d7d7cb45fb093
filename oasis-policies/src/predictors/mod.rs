//! Predictors: whose query the blocks of the next step are ranked by.

mod draft_query;
mod exact;
mod last_query;

pub use draft_query::DraftQuery;
pub use exact::Exact;
pub use last_query::LastQuery;

use oasis_core::policy::{Aggregate, PredictBatch, Predictor, QuerySource, rank_by_score};
use oasis_core::working_set::Ranking;

/// Ranks every block by its score; the three kinds differ in the query they are given.
struct ScoreRanker {
    source: QuerySource,
    aggregate: Aggregate,
    /// Scratch.
    scores: Vec<f32>,
}

impl ScoreRanker {
    fn boxed(source: QuerySource, aggregate: Aggregate) -> Box<dyn Predictor> {
        Box::new(Self { source, aggregate, scores: Vec::new() })
    }
}

impl Predictor for ScoreRanker {
    fn query_source(&self) -> QuerySource {
        self.source
    }

    fn by_score(&self) -> Option<Aggregate> {
        Some(self.aggregate)
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        rank_by_score(batch, self.aggregate, &mut self.scores, ranking);
    }
}
