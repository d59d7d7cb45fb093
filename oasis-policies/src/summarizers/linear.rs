//! Scoring of linear summarizers, `score(q, rows) = expand(q) . rows`: one pass over the summaries.
//!
//! Compiled once for every SIMD level and chosen at run time. Products are added in [`LANES`] fixed lanes with fused
//! multiply-add and the lanes in a fixed tree, so that every machine gives the same scores.

use oasis_core::geometry::HeadShape;
use oasis_core::policy::{Aggregate, ScoreTask};
use pulp::{Arch, NullaryFnOnce};

const LANES: usize = 16;

/// How the words of a block's summary stand for the numbers that scores are computed with.
pub(super) trait Code: Copy {
    /// Words of one block.
    fn words(self) -> usize;

    /// Numbers of one block.
    fn width(self) -> usize;

    /// The numbers of one block, `[width]`, either the words themselves or written to `scratch`, `[width]`.
    fn decode<'a>(self, words: &'a [u32], scratch: &'a mut [f32]) -> &'a [f32];
}

/// This many numbers, one a word.
#[derive(Clone, Copy)]
pub(super) struct Floats(pub usize);

impl Code for Floats {
    fn words(self) -> usize {
        self.0
    }

    fn width(self) -> usize {
        self.0
    }

    #[inline(always)]
    fn decode<'a>(self, words: &'a [u32], _scratch: &'a mut [f32]) -> &'a [f32] {
        bytemuck::cast_slice(words)
    }
}

/// Scores all tasks. `expand` *adds* the expansion of one query, `[head_dim]`, to `[width]` numbers.
///
/// Being linear, the queries of a group are summed before the pass for [`Aggregate::Sum`]; [`Aggregate::Max`] scores
/// each of them while the block is in cache.
pub(super) fn score(
    shape: HeadShape,
    code: impl Code,
    aggregate: Aggregate,
    tasks: &mut [ScoreTask<'_>],
    expand: impl Fn(&[f32], &mut [f32]),
) {
    let arch = Arch::new();
    let width = code.width();
    let (mut expanded, mut scratch) = (Vec::new(), vec![0.0; width]);
    for task in tasks {
        let queries = task.query.chunks_exact(shape.head_dim);
        expanded.clear();
        match aggregate {
            Aggregate::Sum => {
                expanded.resize(width, 0.0);
                queries.for_each(|query| expand(query, &mut expanded));
                let (query, scratch) = (&expanded, &mut scratch);
                arch.dispatch(Sum { code, query, scratch, summaries: task.summaries, scores: task.scores });
            }
            Aggregate::Max => {
                expanded.resize(shape.group * width, 0.0);
                expanded.chunks_exact_mut(width).zip(queries).for_each(|(row, query)| expand(query, row));
                let (queries, scratch) = (&expanded, &mut scratch);
                arch.dispatch(Max { code, queries, scratch, summaries: task.summaries, scores: task.scores });
            }
        }
    }
}

/// One dot product of `query`, `[width]`, a block.
struct Sum<'a, C> {
    code: C,
    query: &'a [f32],
    scratch: &'a mut [f32],
    summaries: &'a [u32],
    scores: &'a mut [f32],
}

// Structs, not closures: the shim that calls a closure is compiled without the SIMD level's instructions.
impl<C: Code> NullaryFnOnce for Sum<'_, C> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (score, words) in self.scores.iter_mut().zip(self.summaries.chunks_exact(self.code.words())) {
            *score = dot(self.query, self.code.decode(words, self.scratch));
        }
    }
}

/// The largest dot product of any of `queries`, `[group][width]`, a block; NaN only when all are.
struct Max<'a, C> {
    code: C,
    queries: &'a [f32],
    scratch: &'a mut [f32],
    summaries: &'a [u32],
    scores: &'a mut [f32],
}

impl<C: Code> NullaryFnOnce for Max<'_, C> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (score, words) in self.scores.iter_mut().zip(self.summaries.chunks_exact(self.code.words())) {
            let block = self.code.decode(words, self.scratch);
            let mut best = f32::NAN;
            for query in self.queries.chunks_exact(self.code.width()) {
                best = best.max(dot(query, block));
            }
            *score = best;
        }
    }
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for (x, y) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] = x[lane].mul_add(y[lane], lanes[lane]);
        }
    }
    for ((lane, x), y) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane = x.mul_add(*y, *lane);
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use quickcheck::quickcheck;

    quickcheck! {
        fn dot_is_near_the_f64_sum_at_any_length(values: Vec<(i16, i16)>) -> bool {
            let (a, b): (Vec<f32>, Vec<f32>) = values.iter().map(|&(x, y)| (x as f32 / 997.0, y as f32 / 991.0)).unzip();
            let exact: f64 = a.iter().zip(&b).map(|(x, y)| *x as f64 * *y as f64).sum();
            let size: f64 = a.iter().zip(&b).map(|(x, y)| (*x as f64 * *y as f64).abs()).sum();
            (dot(&a, &b) as f64 - exact).abs() <= 1e-6 * size
        }

        fn every_simd_level_gives_the_same_bits(values: Vec<(i16, i16)>) -> bool {
            let (a, b): (Vec<f32>, Vec<f32>) = values.iter().map(|&(x, y)| (x as f32 / 997.0, y as f32 / 991.0)).unzip();
            let on = |arch: Arch| {
                let mut score = [0.0];
                let (code, summaries) = (Floats(b.len()), bytemuck::cast_slice(&b));
                arch.dispatch(Sum { code, query: &a, scratch: &mut [], summaries, scores: &mut score });
                score[0].to_bits()
            };
            a.is_empty() || on(Arch::new()) == on(Arch::Scalar)
        }
    }
}
