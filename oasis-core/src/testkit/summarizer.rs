//! Conformance of summarizers.

use super::{Random, for_all};
use crate::geometry::HeadShape;
use crate::policy::{Aggregate, ScoreTask, SummarizeTask, Summarizer, SummarizerSpec};

const HEAD_DIMS: [usize; 4] = [32, 64, 80, 128];

/// Checks the obligations of [`Summarizer`]: every element is written, blocks do not influence each other, the result
/// is deterministic, NaN in one block leaves the others alone; for all usual head sizes and groups of 1 to 8.
///
/// # Panics
/// When an obligation is broken.
pub fn conforms(spec: &dyn SummarizerSpec) {
    for head_dim in HEAD_DIMS {
        for group in 1..=8 {
            check_shape(spec, HeadShape { group, head_dim, block_tokens: 16 }, &mut Random::new(head_dim as u64));
        }
    }
    for_all(20, |random| check_shape(spec, random_shape(random), random));
}

/// Checks for a summarizer that claims it that a query's score is at least its dot product with every key of the block.
///
/// # Panics
/// When a key scores higher than its block, by more than rounding.
pub fn bounds_every_key(spec: &dyn SummarizerSpec) {
    for_all(60, |random| {
        let shape = HeadShape { group: 1, ..random_shape(random) };
        let summarizer = build(spec, shape);
        let keys = random.floats(4 * shape.block_tokens * shape.head_dim);
        let query = random.floats(shape.head_dim);
        let scores = score(&*summarizer, shape, Aggregate::Sum, &query, &summarize(&*summarizer, shape, &keys));
        for (block, keys) in keys.chunks_exact(shape.block_tokens * shape.head_dim).enumerate() {
            for key in keys.chunks_exact(shape.head_dim) {
                let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let bound = f64::from(scores[block]);
                assert!(bound >= dot - 1e-4, "block {block}: a key scores {dot}, above the bound {bound}");
            }
        }
    });
}

fn random_shape(random: &mut Random) -> HeadShape {
    HeadShape {
        group: random.within(1, 8),
        head_dim: random.pick(&HEAD_DIMS),
        block_tokens: random.pick(&[1, 4, 16, 32]),
    }
}

fn build(spec: &dyn SummarizerSpec, shape: HeadShape) -> Box<dyn Summarizer> {
    spec.build(shape).unwrap_or_else(|error| panic!("{spec:?} refuses {shape:?}: {error}"))
}

fn check_shape(spec: &dyn SummarizerSpec, shape: HeadShape, random: &mut Random) {
    let summarizer = build(spec, shape);
    assert!(summarizer.rows_per_block() >= 1, "a block has at least one summary row");
    let block = shape.block_tokens * shape.head_dim;
    let blocks = random.within(1, 6);
    let mut keys = random.floats(blocks * block);
    let query = random.floats(shape.group * shape.head_dim);

    let rows = check_summaries(&*summarizer, shape, &keys);
    for aggregate in [Aggregate::Sum, Aggregate::Max] {
        let scores = check_scores(&*summarizer, shape, aggregate, &query, &rows);

        let spoilt = random.below(blocks);
        let element = spoilt * block + random.below(block);
        let sound = std::mem::replace(&mut keys[element], f32::NAN);
        let with_nan = score(&*summarizer, shape, aggregate, &query, &summarize(&*summarizer, shape, &keys));
        keys[element] = sound;
        for other in (0..blocks).filter(|&other| other != spoilt) {
            assert_same(&with_nan[other..=other], &scores[other..=other], "NaN in another block's keys");
        }
    }
    summarizer.summarize(shape, &mut []);
    summarizer.score(shape, Aggregate::Sum, &mut []);
    assert!(score(&*summarizer, shape, Aggregate::Sum, &query, &[]).is_empty());
}

fn check_summaries(summarizer: &dyn Summarizer, shape: HeadShape, keys: &[f32]) -> Vec<f32> {
    let block = shape.block_tokens * shape.head_dim;
    let width = summarizer.rows_per_block() * shape.head_dim;
    let rows = summarize(summarizer, shape, keys);
    let mut one_by_one = vec![7.0; rows.len()];
    let mut tasks: Vec<_> = (keys.chunks_exact(block).zip(one_by_one.chunks_exact_mut(width)))
        .map(|(keys, rows)| SummarizeTask { keys, rows })
        .collect();
    // Backwards: order must not matter.
    tasks.reverse();
    summarizer.summarize(shape, &mut tasks);
    assert_same(&one_by_one, &rows, "blocks summarised together and one by one, over different old contents");
    rows
}

fn check_scores(
    summarizer: &dyn Summarizer,
    shape: HeadShape,
    aggregate: Aggregate,
    query: &[f32],
    rows: &[f32],
) -> Vec<f32> {
    let width = summarizer.rows_per_block() * shape.head_dim;
    let scores = score(summarizer, shape, aggregate, query, rows);
    assert_same(&score(summarizer, shape, aggregate, query, rows), &scores, "the same scores computed twice");
    let mut one_by_one = vec![7.0; scores.len()];
    let mut tasks: Vec<_> = (rows.chunks_exact(width).zip(one_by_one.chunks_exact_mut(1)))
        .map(|(summaries, scores)| ScoreTask { query, summaries, scores })
        .collect();
    tasks.reverse();
    summarizer.score(shape, aggregate, &mut tasks);
    assert_same(&one_by_one, &scores, "blocks scored together and one by one, over different old contents");
    scores
}

fn summarize(summarizer: &dyn Summarizer, shape: HeadShape, keys: &[f32]) -> Vec<f32> {
    let blocks = keys.len() / (shape.block_tokens * shape.head_dim);
    let mut rows = vec![f32::NAN; blocks * summarizer.rows_per_block() * shape.head_dim];
    summarizer.summarize(shape, &mut [SummarizeTask { keys, rows: &mut rows }]);
    rows
}

fn score(
    summarizer: &dyn Summarizer,
    shape: HeadShape,
    aggregate: Aggregate,
    query: &[f32],
    summaries: &[f32],
) -> Vec<f32> {
    let mut scores = vec![f32::NAN; summaries.len() / (summarizer.rows_per_block() * shape.head_dim)];
    summarizer.score(shape, aggregate, &mut [ScoreTask { query, summaries, scores: &mut scores }]);
    scores
}

/// Equal bit by bit, NaN equal to NaN.
fn assert_same(left: &[f32], right: &[f32], what: &str) {
    let same = |(l, r): (&f32, &f32)| l.to_bits() == r.to_bits() || (l.is_nan() && r.is_nan());
    assert!(left.len() == right.len() && left.iter().zip(right).all(same), "{what} differ: {left:?}, {right:?}");
}
