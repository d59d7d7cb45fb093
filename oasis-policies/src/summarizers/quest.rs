//! `quest`: the largest and smallest key of a block, coordinate by coordinate.

use super::linear::{self, Floats};
use oasis_core::geometry::HeadShape;
use oasis_core::policy::{Aggregate, DeviceCode, ScoreTask, SpecError, SummarizeTask, Summarizer, SummarizerSpec};
use pulp::{Arch, NullaryFnOnce};
use serde::{Deserialize, Serialize};

const DEVICE_CODE: DeviceCode = DeviceCode::new("quest.cuh", include_str!("quest.cuh"));

/// Row 0 is the coordinate-wise maximum of a block's keys, row 1 the minimum; the score `sum_d max(q_d max_d, q_d
/// min_d)` is an upper bound of `q . k` over the block (Quest, arXiv 2406.10774).
///
/// A product with the maximum is the larger one where `q_d` is positive, one with the minimum where it is negative, so
/// the score is linear in `[max(q, 0); min(q, 0)]`. A NaN coordinate of one key or query is passed over.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Quest {}

oasis_core::register! {
    kind: "quest", about: "Coordinate-wise maximum and minimum of a block's keys: an upper bound of every score",
    device_code: true,
    impl SummarizerSpec for Quest {
        fn build(&self, _shape: HeadShape) -> Result<Box<dyn Summarizer>, SpecError> {
            Ok(Box::new(QuestSummarizer))
        }
    }
}

struct QuestSummarizer;

impl Summarizer for QuestSummarizer {
    fn rows_per_block(&self) -> usize {
        2
    }

    fn summarize(&self, shape: HeadShape, tasks: &mut [SummarizeTask<'_>]) {
        for task in tasks {
            bounds(shape, task.keys, bytemuck::cast_slice_mut(task.rows));
        }
    }

    fn score(&self, shape: HeadShape, aggregate: Aggregate, tasks: &mut [ScoreTask<'_>]) {
        linear::score(shape, Floats(2 * shape.head_dim), aggregate, tasks, expand);
    }

    fn device_code(&self) -> Option<DeviceCode> {
        Some(DEVICE_CODE)
    }
}

/// Largest and smallest keys: `keys` `[blocks][block_tokens][head_dim]` -> `rows` `[blocks][2][head_dim]`.
pub(super) fn bounds(shape: HeadShape, keys: &[f32], rows: &mut [f32]) {
    Arch::new().dispatch(Bounds { shape, keys, rows });
}

/// Summaries of blocks as bounds in a code of `row_words` words a row; `encode(values, up, row)` rounds up or down.
pub(super) fn encode_bounds(
    shape: HeadShape,
    row_words: usize,
    encode: fn(&[f32], bool, &mut [u32]),
    tasks: &mut [SummarizeTask<'_>],
) {
    let mut rows = vec![0.0; 2 * shape.head_dim];
    for task in tasks {
        let blocks = task.keys.chunks_exact(shape.block_tokens * shape.head_dim);
        for (coded, keys) in task.rows.chunks_exact_mut(2 * row_words).zip(blocks) {
            bounds(shape, keys, &mut rows);
            let (max, min) = rows.split_at(shape.head_dim);
            let (max_row, min_row) = coded.split_at_mut(row_words);
            encode(max, true, max_row);
            encode(min, false, min_row);
        }
    }
}

/// What a query's coordinates are multiplied by: `[2][head_dim]`, maxima where it is positive, minima where negative.
pub(super) fn expand(query: &[f32], expanded: &mut [f32]) {
    let (positive, negative) = expanded.split_at_mut(query.len());
    for ((positive, negative), &q) in positive.iter_mut().zip(negative).zip(query) {
        // Comparisons, not `max`: NaN adds nothing.
        *positive += if q > 0.0 { q } else { 0.0 };
        *negative += if q < 0.0 { q } else { 0.0 };
    }
}

struct Bounds<'a> {
    shape: HeadShape,
    keys: &'a [f32],
    rows: &'a mut [f32],
}

impl NullaryFnOnce for Bounds<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { shape, keys, rows } = self;
        let blocks = keys.chunks_exact(shape.block_tokens * shape.head_dim);
        for (rows, keys) in rows.chunks_exact_mut(2 * shape.head_dim).zip(blocks) {
            let (max, min) = rows.split_at_mut(shape.head_dim);
            max.fill(f32::NEG_INFINITY);
            min.fill(f32::INFINITY);
            for key in keys.chunks_exact(shape.head_dim) {
                for ((max, min), &k) in max.iter_mut().zip(min.iter_mut()).zip(key) {
                    *max = if k > *max { k } else { *max };
                    *min = if k < *min { k } else { *min };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: HeadShape = HeadShape { group: 2, head_dim: 3, block_tokens: 2 };

    fn summarize(keys: &[f32]) -> Vec<f32> {
        let mut rows = vec![0; keys.len()];
        QuestSummarizer.summarize(SHAPE, &mut [SummarizeTask { keys, rows: &mut rows }]);
        rows.into_iter().map(f32::from_bits).collect()
    }

    fn score(aggregate: Aggregate, query: &[f32], summaries: &[f32]) -> Vec<f32> {
        let mut scores = vec![0.0; summaries.len() / 6];
        QuestSummarizer.score(
            SHAPE,
            aggregate,
            &mut [ScoreTask { query, summaries: bytemuck::cast_slice(summaries), scores: &mut scores }],
        );
        scores
    }

    #[test]
    fn rows_are_the_maximum_then_the_minimum() {
        let keys = [1.0, -2.0, 3.0, 0.5, 4.0, -1.0, /* block 1 */ 7.0, 7.0, 7.0, 8.0, 6.0, 7.0];
        assert_eq!(summarize(&keys), [1.0, 4.0, 3.0, 0.5, -2.0, -1.0, 8.0, 7.0, 7.0, 7.0, 6.0, 7.0]);
    }

    #[test]
    fn a_score_takes_the_better_bound_of_each_coordinate() {
        let rows = [1.0, 4.0, 3.0, 0.5, -2.0, -1.0];
        // Query 0: 2*1 + -1*-2 + 0 = 4; query 1: -1*0.5 + 1*4 + 1*3 = 6.5.
        let query = [2.0, -1.0, 0.0, -1.0, 1.0, 1.0];
        assert_eq!(score(Aggregate::Sum, &query, &rows), [10.5]);
        assert_eq!(score(Aggregate::Max, &query, &rows), [6.5]);
    }

    #[test]
    fn nan_is_passed_over_in_a_key_and_ranks_a_whole_nan_column_last() {
        let keys = [f32::NAN, 1.0, 1.0, 2.0, 3.0, 1.0, /* block 1 */ f32::NAN, 1.0, 1.0, f32::NAN, 3.0, 1.0];
        let rows = summarize(&keys);
        assert_eq!(rows[..6], [2.0, 3.0, 1.0, 2.0, 1.0, 1.0]);
        let scores = score(Aggregate::Sum, &[1.0, f32::NAN, 1.0, 0.0, 0.0, 0.0], &rows);
        assert_eq!(scores[0], 3.0);
        assert!(scores[1].is_nan());
    }
}
