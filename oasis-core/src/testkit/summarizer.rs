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

/// Checks for a summarizer that claims it that a query's score is at least its dot product with every key of the block:
/// for keys of ordinary size and for keys that are meant to break a rounding, of sizes from 1e-30 to 1e15, all equal, or
/// equal to powers of two and their neighbours.
///
/// # Panics
/// When a key scores higher than its block, by more than the rounding of a sum.
pub fn bounds_every_key(spec: &dyn SummarizerSpec) {
    for_all(400, |random| {
        let shape = HeadShape { group: 1, ..random_shape(random) };
        let summarizer = build(spec, shape);
        let block = shape.block_tokens * shape.head_dim;
        let keys: Vec<f32> = (0..4).flat_map(|_| hostile_floats(random, block)).collect();
        // A query along a key is where a volume that is too small shows.
        let along = random.below(keys.len() / shape.head_dim) * shape.head_dim;
        let query = match random.one_in(2) {
            true => keys[along..along + shape.head_dim].to_vec(),
            false => hostile_floats(random, shape.head_dim),
        };
        let rows = summarize(&*summarizer, shape, &keys);
        let scores = score(&*summarizer, shape, Aggregate::Sum, &query, &rows);
        for (index, keys) in keys.chunks_exact(block).enumerate() {
            let bound = f64::from(scores[index]);
            // What a sum is rounded by goes with the largest of its terms, not with the sum.
            let largest = |d: usize| keys.iter().skip(d).step_by(shape.head_dim).fold(0.0, |m: f32, k| m.max(k.abs()));
            let reach: f32 = keys.iter().fold(0.0, |m, k| m.max(k.abs()));
            let size: f64 =
                (query.iter().enumerate()).map(|(d, q)| f64::from(q.abs()) * f64::from(largest(d) + reach)).sum();
            for key in keys.chunks_exact(shape.head_dim) {
                let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                assert!(
                    bound >= dot - 1e-5 * size - 1e-37,
                    "block {index}: a key scores {dot}, above the bound {bound}"
                );
            }
        }
    });
}

/// Numbers of one of several kinds that are hard to round.
fn hostile_floats(random: &mut Random, count: usize) -> Vec<f32> {
    let scale = random.pick(&[1e-30, 1e-9, 1.0, 1.0, 448.0, 1e4, 1e15]);
    let constant = random.float();
    match random.below(5) {
        0 => random.floats(count).iter().map(|x| x * scale).collect(),
        1 => vec![constant * scale; count],
        // A few giants among small ones.
        2 => {
            (0..count).map(|_| if random.one_in(20) { random.float() * scale } else { random.float() * 1e-3 }).collect()
        }
        3 => (0..count)
            .map(|_| {
                let power = 2.0_f32.powi(random.within(0, 30) as i32 - 15);
                let near = random.pick(&[power, power.next_up(), power.next_down()]);
                if random.one_in(2) { near } else { -near }
            })
            .collect(),
        _ => (0..count).map(|_| if random.one_in(2) { 0.0 } else { random.float() * scale }).collect(),
    }
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
    assert!(width(&*summarizer, shape) >= 1, "a block has at least one summary row of at least one word");
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

fn check_summaries(summarizer: &dyn Summarizer, shape: HeadShape, keys: &[f32]) -> Vec<u32> {
    let block = shape.block_tokens * shape.head_dim;
    let width = width(summarizer, shape);
    let rows = summarize(summarizer, shape, keys);
    let mut one_by_one = vec![7; rows.len()];
    let mut tasks: Vec<_> = (keys.chunks_exact(block).zip(one_by_one.chunks_exact_mut(width)))
        .map(|(keys, rows)| SummarizeTask { keys, rows })
        .collect();
    // Backwards: order must not matter.
    tasks.reverse();
    summarizer.summarize(shape, &mut tasks);
    assert!(one_by_one == rows, "blocks summarised together and one by one, over different old contents, differ");
    rows
}

fn check_scores(
    summarizer: &dyn Summarizer,
    shape: HeadShape,
    aggregate: Aggregate,
    query: &[f32],
    rows: &[u32],
) -> Vec<f32> {
    let width = width(summarizer, shape);
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

/// Words of one block's summary.
fn width(summarizer: &dyn Summarizer, shape: HeadShape) -> usize {
    summarizer.rows_per_block() * summarizer.row_words(shape)
}

fn summarize(summarizer: &dyn Summarizer, shape: HeadShape, keys: &[f32]) -> Vec<u32> {
    let blocks = keys.len() / (shape.block_tokens * shape.head_dim);
    let mut rows = vec![u32::MAX; blocks * width(summarizer, shape)];
    summarizer.summarize(shape, &mut [SummarizeTask { keys, rows: &mut rows }]);
    rows
}

fn score(
    summarizer: &dyn Summarizer,
    shape: HeadShape,
    aggregate: Aggregate,
    query: &[f32],
    summaries: &[u32],
) -> Vec<f32> {
    let mut scores = vec![f32::NAN; summaries.len() / width(summarizer, shape)];
    summarizer.score(shape, aggregate, &mut [ScoreTask { query, summaries, scores: &mut scores }]);
    scores
}

/// Equal bit by bit, NaN equal to NaN.
fn assert_same(left: &[f32], right: &[f32], what: &str) {
    let same = |(l, r): (&f32, &f32)| l.to_bits() == r.to_bits() || (l.is_nan() && r.is_nan());
    assert!(left.len() == right.len() && left.iter().zip(right).all(same), "{what} differ: {left:?}, {right:?}");
}
