//! `mean`: the mean key of a block.

use super::linear::{self, Floats};
use oasis_core::geometry::HeadShape;
use oasis_core::policy::{Aggregate, DeviceCode, ScoreTask, SpecError, SummarizeTask, Summarizer, SummarizerSpec};
use pulp::{Arch, NullaryFnOnce};
use serde::{Deserialize, Serialize};

const DEVICE_CODE: DeviceCode = DeviceCode::new("mean.cuh", include_str!("mean.cuh"));

/// One row, the mean of a block's keys; the score is `q . mean`, the mean score of the block. Half the memory of
/// [`Quest`](super::Quest), and blind to a single key that stands out.
///
/// This is how MoBA (arXiv 2502.13189, section 2.2) ranks blocks: with `exact`, `fetch-all` and `recent = 1` a step
/// chooses as MoBA does. Deviations: MoBA's model is trained with its blocks, of 512 tokens and more, and each query head
/// chooses for itself; here a group chooses together. InfLLM (arXiv 2402.04617) is alike but keeps a few representative
/// keys of each block, chosen by the attention that they received, instead of their mean.
///
/// A NaN coordinate of a query is passed over; one of a key makes its block rank last.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Mean {}

oasis_core::register! {
    kind: "mean", about: "Mean of a block's keys: half the memory of quest, blind to single keys that stand out",
    device_code: true,
    impl SummarizerSpec for Mean {
        fn build(&self, _shape: HeadShape) -> Result<Box<dyn Summarizer>, SpecError> {
            Ok(Box::new(MeanSummarizer))
        }
    }
}

struct MeanSummarizer;

impl Summarizer for MeanSummarizer {
    fn rows_per_block(&self) -> usize {
        1
    }

    fn summarize(&self, shape: HeadShape, tasks: &mut [SummarizeTask<'_>]) {
        for task in tasks {
            means(shape, task.keys, bytemuck::cast_slice_mut(task.rows));
        }
    }

    fn score(&self, shape: HeadShape, aggregate: Aggregate, tasks: &mut [ScoreTask<'_>]) {
        linear::score(shape, Floats(shape.head_dim), aggregate, tasks, expand);
    }

    fn device_code(&self) -> Option<DeviceCode> {
        Some(DEVICE_CODE)
    }
}

/// A query scores by its dot product; a NaN coordinate adds nothing.
pub(super) fn expand(query: &[f32], expanded: &mut [f32]) {
    for (expanded, &q) in expanded.iter_mut().zip(query) {
        *expanded += if q.is_nan() { 0.0 } else { q };
    }
}

/// Mean keys: `keys` `[blocks][block_tokens][head_dim]` -> `rows` `[blocks][head_dim]`.
pub(super) fn means(shape: HeadShape, keys: &[f32], rows: &mut [f32]) {
    Arch::new().dispatch(Means { shape, keys, rows });
}

struct Means<'a> {
    shape: HeadShape,
    keys: &'a [f32],
    rows: &'a mut [f32],
}

impl NullaryFnOnce for Means<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { shape, keys, rows } = self;
        let blocks = keys.chunks_exact(shape.block_tokens * shape.head_dim);
        for (mean, keys) in rows.chunks_exact_mut(shape.head_dim).zip(blocks) {
            mean.fill(0.0);
            for key in keys.chunks_exact(shape.head_dim) {
                mean.iter_mut().zip(key).for_each(|(mean, k)| *mean += k);
            }
            mean.iter_mut().for_each(|mean| *mean /= shape.block_tokens as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: HeadShape = HeadShape { group: 2, head_dim: 2, block_tokens: 2 };

    #[test]
    fn a_row_is_the_mean_and_a_score_its_dot_product() {
        let mut rows = [0; 4];
        let keys = [1.0, 2.0, 3.0, -2.0, /* block 1 */ 0.0, 8.0, 1.0, 0.0];
        MeanSummarizer.summarize(SHAPE, &mut [SummarizeTask { keys: &keys, rows: &mut rows }]);
        assert_eq!(rows.map(f32::from_bits), [2.0, 0.0, 0.5, 4.0]);

        let score = |aggregate| {
            let mut scores = [0.0; 2];
            let query = [1.0, 1.0, 3.0, f32::NAN];
            let task = ScoreTask { query: &query, summaries: &rows, scores: &mut scores };
            MeanSummarizer.score(SHAPE, aggregate, &mut [task]);
            scores
        };
        assert_eq!(score(Aggregate::Sum), [8.0, 6.0]);
        assert_eq!(score(Aggregate::Max), [6.0, 4.5]);
    }

    #[test]
    fn a_nan_key_spoils_its_own_block_only() {
        let mut rows = [0; 4];
        let keys = [f32::NAN, 2.0, 3.0, 2.0, 0.0, 8.0, 1.0, 0.0];
        MeanSummarizer.summarize(SHAPE, &mut [SummarizeTask { keys: &keys, rows: &mut rows }]);
        let mut scores = [0.0; 2];
        let task = ScoreTask { query: &[1.0, 1.0, 1.0, 1.0], summaries: &rows, scores: &mut scores };
        MeanSummarizer.score(SHAPE, Aggregate::Sum, &mut [task]);
        assert!(scores[0].is_nan());
        assert_eq!(scores[1], 9.0);
    }
}
