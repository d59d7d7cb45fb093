//! Attention of a decode step: the query rows of one KV head over a list of KV runs.

use std::ops::Range;

use rayon::prelude::*;

use super::simd::{Isa, Kernel, LANES, dispatch, exp, load_part};

/// Tokens of one step of the online softmax.
const TILE: usize = LANES;

/// Runs of one part: parts are computed apart, in parallel where threads are free, and combined in order.
const PART_RUNS: usize = 32;

/// Keys and values of consecutive tokens of one KV head.
#[derive(Debug, Clone, Copy)]
pub struct KvRun<'a> {
    /// `[tokens][head_dim]`, after RoPE.
    pub keys: &'a [f32],
    /// `[tokens][head_dim]`.
    pub values: &'a [f32],
    /// The run is visible to queries `first_query..`: 0 for all of them, and for the draft token's own run the number
    /// of queries of normal rows, which come first.
    pub first_query: usize,
}

/// Softmax attention of some queries over the tokens of `runs`, for one KV head.
///
/// - `queries`, `out` `[queries][head_dim]`: the group's query heads of one row after the other
/// - `scale` is multiplied to every score, usually `1 / sqrt(head_dim)`
///
/// A query that sees no token gets zeros. The online softmax goes over the runs in the given order, cut every 32 runs
/// into parts that are combined in order. A query's bits depend on itself and on the list of runs it sees, and not on
/// the other queries, on runs at the end of the list that it does not see, or on the number of threads; callers that
/// compare dense with sparse decoding pass the same runs in the same order.
///
/// # Panics
/// When a slice's length does not match the shapes above.
pub fn decode_attention(queries: &[f32], head_dim: usize, runs: &[KvRun], scale: f32, out: &mut [f32]) {
    assert!(head_dim > 0 && queries.len().is_multiple_of(head_dim), "attention: queries are not [queries][{head_dim}]");
    assert_eq!(queries.len(), out.len(), "attention: queries and out differ in length");
    for run in runs {
        assert_eq!(run.keys.len(), run.values.len(), "attention: a run's keys and values differ in length");
        assert_eq!(run.keys.len() % head_dim, 0, "attention: a run is not [tokens][{head_dim}]");
    }
    let attend = |runs| dispatch(Attend { queries, head_dim, runs, scale });
    let parts: Vec<Part> =
        if runs.len() <= PART_RUNS { vec![attend(runs)] } else { runs.par_chunks(PART_RUNS).map(attend).collect() };
    for (query, out) in out.chunks_exact_mut(head_dim).enumerate() {
        combine(&parts, query, out);
    }
}

/// Writes one query's output from the parts that it sees a token of.
fn combine(parts: &[Part], query: usize, out: &mut [f32]) {
    out.fill(0.0);
    let seen = || parts.iter().filter(|part| part.totals[query] != 0.0);
    let peak =
        seen().fold(f32::NEG_INFINITY, |max, part| if part.peaks[query] > max { part.peaks[query] } else { max });
    let mut total = 0.0;
    for part in seen() {
        let weight = exp(part.peaks[query] - peak);
        total += weight * part.totals[query];
        let values = &part.values[query * out.len()..][..out.len()];
        for (out, value) in out.iter_mut().zip(values) {
            *out += weight * value;
        }
    }
    if total != 0.0 {
        out.iter_mut().for_each(|out| *out /= total);
    }
}

/// Online softmax of some runs, one entry a query.
struct Part {
    /// Largest score; negative infinity before the first token.
    peaks: Vec<f32>,
    /// Sum of `e^(score - peak)`.
    totals: Vec<f32>,
    /// Sum of `e^(score - peak) * value` `[queries][head_dim]`.
    values: Vec<f32>,
}

/// One part of a call.
struct Attend<'a> {
    queries: &'a [f32],
    head_dim: usize,
    runs: &'a [KvRun<'a>],
    scale: f32,
}

impl Kernel for Attend<'_> {
    type Output = Part;

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) -> Part {
        let count = self.queries.len() / self.head_dim;
        let mut part = Part {
            peaks: vec![f32::NEG_INFINITY; count],
            totals: vec![0.0; count],
            values: vec![0.0; self.queries.len()],
        };
        let mut weights = vec![0.0; count * (TILE + 1)];
        let step = TILE * self.head_dim;
        for run in self.runs {
            for (keys, values) in run.keys.chunks(step).zip(run.values.chunks(step)) {
                self.tile(isa, &mut part, &mut weights, run.first_query..count, keys, values);
            }
        }
        part
    }
}

impl Attend<'_> {
    /// Some queries over up to [`TILE`] tokens, whose keys and values stay in cache from one query to the next.
    /// `weights` is scratch `[queries][TILE + 1]`: what becomes of each token, and the factor on what was there before.
    #[inline(always)]
    fn tile<S: Isa>(
        &self,
        isa: S,
        part: &mut Part,
        weights: &mut [f32],
        queries: Range<usize>,
        keys: &[f32],
        values: &[f32],
    ) {
        let dim = self.head_dim;
        let weights = &mut weights[..queries.len() * (TILE + 1)];
        for (query, weights) in queries.clone().zip(weights.as_chunks_mut::<{ TILE + 1 }>().0) {
            let mut scores = [f32::NEG_INFINITY; TILE];
            score(isa, &self.queries[query * dim..][..dim], keys, self.scale, &mut scores);
            let before = part.peaks[query];
            let tile = isa.peak(isa.load(&scores));
            let peak = if tile > before { tile } else { before };
            part.peaks[query] = peak;
            // Where there is nothing to weigh yet, any finite reference will do.
            let reference = if peak == f32::NEG_INFINITY { 0.0 } else { peak };
            let (shifted, kept) = weights.split_first_chunk_mut::<TILE>().expect("TILE + 1 weights");
            isa.store(shifted, isa.add(isa.load(&scores), isa.splat(-reference)));
            kept[0] = before - reference;
        }
        // One loop over all queries: vectorised, and long enough to hide its latency.
        weights.iter_mut().for_each(|weight| *weight = exp(*weight));
        for (query, weights) in queries.zip(weights.as_chunks::<{ TILE + 1 }>().0) {
            let (tokens, kept) = weights.split_first_chunk::<TILE>().expect("TILE + 1 weights");
            part.totals[query] = part.totals[query] * kept[0] + isa.sum(isa.load(tokens));
            accumulate(isa, &mut part.values[query * dim..][..dim], kept[0], tokens, values);
        }
    }
}

/// `scores[token] = scale * query · key`, for the tokens of `keys`.
#[inline(always)]
fn score<S: Isa>(isa: S, query: &[f32], keys: &[f32], scale: f32, scores: &mut [f32; TILE]) {
    let dim = query.len();
    // Whole blocks of the usual head sizes; the general path below gives the same bits.
    if keys.len() == TILE * dim {
        match dim {
            32 => return score_block::<2, S>(isa, query, keys, scale, scores),
            64 => return score_block::<4, S>(isa, query, keys, scale, scores),
            96 => return score_block::<6, S>(isa, query, keys, scale, scores),
            128 => return score_block::<8, S>(isa, query, keys, scale, scores),
            _ => {}
        }
    }
    let mut groups = keys.chunks_exact(4 * dim);
    let mut token = 0;
    for group in &mut groups {
        let dots = dots::<4, S>(isa, query, group);
        for dot in dots {
            scores[token] = dot * scale;
            token += 1;
        }
    }
    for key in groups.remainder().chunks_exact(dim) {
        scores[token] = dots::<1, S>(isa, query, key)[0] * scale;
        token += 1;
    }
}

/// [`score`] for [`TILE`] keys of `D` vectors each.
#[inline(always)]
fn score_block<const D: usize, S: Isa>(isa: S, query: &[f32], keys: &[f32], scale: f32, scores: &mut [f32; TILE]) {
    let query = &query.as_chunks::<LANES>().0[..D];
    let keys = &keys.as_chunks::<LANES>().0[..TILE * D];
    let mut acc = [isa.splat(0.0); TILE];
    for i in 0..D {
        let vector = isa.load(&query[i]);
        for token in 0..TILE {
            acc[token] = isa.mul_add(vector, isa.load(&keys[token * D + i]), acc[token]);
        }
    }
    isa.store(scores, isa.mul(isa.sums(acc), isa.splat(scale)));
}

/// Dot products of `query` with `N` keys.
#[inline(always)]
fn dots<const N: usize, S: Isa>(isa: S, query: &[f32], keys: &[f32]) -> [f32; N] {
    let dim = query.len();
    let (vectors, tail) = query.as_chunks::<LANES>();
    let mut key = [keys[..0].as_chunks::<LANES>(); N];
    for n in 0..N {
        let (whole, rest) = keys[n * dim..][..dim].as_chunks::<LANES>();
        key[n] = (&whole[..vectors.len()], rest);
    }
    let mut acc = [isa.splat(0.0); N];
    for (i, vector) in vectors.iter().enumerate() {
        let vector = isa.load(vector);
        for n in 0..N {
            acc[n] = isa.mul_add(vector, isa.load(&key[n].0[i]), acc[n]);
        }
    }
    if !tail.is_empty() {
        let vector = load_part(isa, tail);
        for n in 0..N {
            acc[n] = isa.mul_add(vector, load_part(isa, key[n].1), acc[n]);
        }
    }
    let mut out = [0.0; N];
    for n in 0..N {
        out[n] = isa.sum(acc[n]);
    }
    out
}

/// `out = out * kept + Σ weights[token] * values[token]`, tokens in order.
#[inline(always)]
fn accumulate<S: Isa>(isa: S, out: &mut [f32], kept: f32, weights: &[f32; TILE], values: &[f32]) {
    let dim = out.len();
    let kept = isa.splat(kept);
    let mut at = 0;
    while at + 4 * LANES <= dim {
        strip::<4, S>(isa, &mut out[at..], kept, weights, &values[at..], dim);
        at += 4 * LANES;
    }
    while at + LANES <= dim {
        strip::<1, S>(isa, &mut out[at..], kept, weights, &values[at..], dim);
        at += LANES;
    }
    if at < dim {
        let mut acc = isa.mul(load_part(isa, &out[at..]), kept);
        for (value, &weight) in values.chunks_exact(dim).zip(weights) {
            acc = isa.mul_add(load_part(isa, &value[at..]), isa.splat(weight), acc);
        }
        let mut last = [0.0; LANES];
        isa.store(&mut last, acc);
        out[at..].copy_from_slice(&last[..dim - at]);
    }
}

/// [`accumulate`] for the first `N` vectors of `out`; `values` starts at the same element, rows `dim` apart.
#[inline(always)]
fn strip<const N: usize, S: Isa>(
    isa: S,
    out: &mut [f32],
    kept: S::V,
    weights: &[f32; TILE],
    values: &[f32],
    dim: usize,
) {
    let out = &mut out.as_chunks_mut::<LANES>().0[..N];
    let mut acc = [kept; N];
    for n in 0..N {
        acc[n] = isa.mul(isa.load(&out[n]), kept);
    }
    for (value, &weight) in values.chunks(dim).zip(weights) {
        let Some(value) = value.as_chunks::<LANES>().0.get(..N) else {
            break;
        };
        let weight = isa.splat(weight);
        for n in 0..N {
            acc[n] = isa.mul_add(isa.load(&value[n]), weight, acc[n]);
        }
    }
    for n in 0..N {
        isa.store(&mut out[n], acc[n]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, attend, in_pool, noise};
    use super::*;

    /// Runs of the given token counts, with their keys and values.
    fn cache(counts: &[usize], dim: usize) -> Vec<(Vec<f32>, Vec<f32>)> {
        counts
            .iter()
            .enumerate()
            .map(|(i, n)| (noise(n * dim, 2 * i as u64 + 1), noise(n * dim, 2 * i as u64)))
            .collect()
    }

    fn runs(cache: &[(Vec<f32>, Vec<f32>)]) -> Vec<KvRun<'_>> {
        cache.iter().map(|(keys, values)| KvRun { keys, values, first_query: 0 }).collect()
    }

    fn apply(queries: &[f32], dim: usize, runs: &[KvRun]) -> Vec<f32> {
        let mut out = vec![f32::NAN; queries.len()];
        decode_attention(queries, dim, runs, 1.0 / (dim as f32).sqrt(), &mut out);
        out
    }

    #[test]
    fn matches_double_precision() {
        for dim in [1, 7, 16, 32, 64, 80, 96, 100, 128] {
            for counts in [&[1][..], &[16, 16, 5], &[0, 3, 40], &[16; 70]] {
                let cache = cache(counts, dim);
                let queries: Vec<f32> = noise(3 * dim, 99).iter().map(|x| x * 8.0).collect();
                let out = apply(&queries, dim, &runs(&cache));
                let keys: Vec<f32> = cache.iter().flat_map(|(keys, _)| keys.clone()).collect();
                let values: Vec<f32> = cache.iter().flat_map(|(_, values)| values.clone()).collect();
                for (query, out) in queries.chunks(dim).zip(out.chunks(dim)) {
                    assert_close(out, &attend(query, &keys, &values, 1.0 / (dim as f64).sqrt()), 5e-6);
                }
            }
        }
    }

    #[test]
    fn a_query_has_the_same_bits_in_any_company_and_on_any_number_of_threads() {
        for dim in [32, 64, 80, 128] {
            for blocks in [1, 32, 33, 100] {
                let cache = cache(&vec![16; blocks], dim);
                let runs = runs(&cache);
                let queries = noise(9 * dim, 7);
                let alone: Vec<f32> =
                    queries.chunks(dim).flat_map(|query| in_pool(1, || apply(query, dim, &runs))).collect();
                for (count, threads) in [(2, 2), (8, 1), (9, 5)] {
                    let together = in_pool(threads, || apply(&queries[..count * dim], dim, &runs));
                    assert_eq!(together, alone[..count * dim]);
                }
            }
        }
    }

    #[test]
    fn the_draft_token_changes_nothing_for_the_normal_row() {
        let dim = 64;
        for blocks in [0, 1, 31, 32, 33, 64] {
            let cache = cache(&vec![16; blocks], dim);
            let draft = (noise(dim, 500), noise(dim, 501));
            let queries = noise(8 * dim, 7);
            let normal = apply(&queries[..4 * dim], dim, &runs(&cache));
            let mut all = runs(&cache);
            all.push(KvRun { keys: &draft.0, values: &draft.1, first_query: 4 });
            let both = apply(&queries, dim, &all);
            assert_eq!(both[..4 * dim], normal);
            all.last_mut().expect("the draft run").first_query = 0;
            assert_eq!(both[4 * dim..], apply(&queries[4 * dim..], dim, &all));
        }
    }

    #[test]
    fn no_visible_token_gives_zeros() {
        assert_eq!(apply(&noise(64, 1), 32, &[]), [0.0; 64]);
        let cache = cache(&[0, 4], 32);
        let mut runs = runs(&cache);
        runs[1].first_query = 1;
        let out = apply(&noise(64, 1), 32, &runs);
        assert_eq!(out[..32], [0.0; 32]);
        assert!(out[32..].iter().any(|&x| x != 0.0));
    }

    #[test]
    fn extreme_scores_stay_finite() {
        let keys = [1e19f32, 0.0, -1e19, 0.0];
        let values = [1.0f32, 2.0, 3.0, 4.0];
        let run = KvRun { keys: &keys, values: &values, first_query: 0 };
        let mut out = [0.0; 2];
        decode_attention(&[1e18, 0.0], 2, &[run], 1.0, &mut out);
        assert_eq!(out, [1.0, 2.0]);
    }
}
