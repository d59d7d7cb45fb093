//! Causal attention of a prefill chunk: tiles of scores through faer's matrix product, online softmax between them.

use faer::linalg::matmul::matmul as product;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::simd::{Isa, Kernel, dispatch, exp, max, sum};

/// Rows of a score tile, about: query heads of a group times query tokens.
const ROWS: usize = 256;

/// Key tokens of a score tile.
const TOKENS: usize = 256;

/// Shape of a [`prefill_attention`] call.
#[derive(Debug, Clone, Copy)]
pub struct PrefillShape {
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads; divides `q_heads`.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Position of the chunk's first token; that many tokens come before it in the cache.
    pub start: usize,
}

/// Causal attention of one request's chunk over everything up to and including itself; scores are scaled by
/// `1 / sqrt(head_dim)`.
///
/// - `queries` `[chunk][q_row]`: query heads of a token first in its row, `[q_heads][head_dim]` after RoPE; `q_row` may
///   be longer than that (the fused query, key and value rows)
/// - `keys`, `values` `[kv_heads][capacity][head_dim]`: of each head the first `start + chunk` tokens are read
/// - `out` `[chunk][q_heads * head_dim]`
///
/// Heads and query tiles are spread over the current rayon pool; the same call gives the same bits on any number of
/// threads.
///
/// # Panics
/// When a slice's length does not match the shapes above.
pub fn prefill_attention(shape: PrefillShape, queries: &[f32], keys: &[f32], values: &[f32], out: &mut [f32]) {
    let PrefillShape { q_heads, kv_heads, head_dim, start } = shape;
    let row = q_heads * head_dim;
    let chunk = out.len() / row;
    assert_eq!(out.len(), chunk * row, "prefill attention: out is not [chunk][{row}]");
    if chunk == 0 {
        return;
    }
    let q_row = queries.len() / chunk;
    assert!(
        q_row >= row && queries.len() == chunk * q_row,
        "prefill attention: queries are not [{chunk}][{row} or more]"
    );
    assert_eq!(q_heads % kv_heads, 0, "prefill attention: {q_heads} query heads over {kv_heads} KV heads");
    assert_eq!(keys.len(), values.len(), "prefill attention: keys and values differ in length");
    let per_head = keys.len() / kv_heads;
    assert!(
        keys.len() == kv_heads * per_head
            && per_head.is_multiple_of(head_dim)
            && per_head >= (start + chunk) * head_dim,
        "prefill attention: keys are not [{kv_heads}][{} or more][{head_dim}]",
        start + chunk
    );
    let group = q_heads / kv_heads;
    let tile = (ROWS / group).clamp(16, 128);
    let mut work = Vec::new();
    for (i, out) in out.chunks_mut(tile * row).enumerate() {
        let first = work.len();
        work.extend((0..kv_heads).map(|head| Tile { head, first: i * tile, out: Vec::with_capacity(tile) }));
        for out in out.chunks_exact_mut(row) {
            for (tile, out) in work[first..].iter_mut().zip(out.chunks_exact_mut(group * head_dim)) {
                tile.out.push(out);
            }
        }
    }
    // Later tiles see more tokens: the longest work starts first.
    work.reverse();
    let call = Call { group, head_dim, start, queries, q_row };
    work.into_par_iter().with_max_len(1).for_each_init(Scratch::default, |scratch, tile| {
        let tokens = (start + tile.first + tile.out.len()) * head_dim;
        let keys = &keys[tile.head * per_head..][..tokens];
        let values = &values[tile.head * per_head..][..tokens];
        call.attend(scratch, tile, keys, values);
    });
}

/// Queries of one KV head's group at consecutive tokens.
struct Tile<'a> {
    head: usize,
    /// First token, within the chunk.
    first: usize,
    /// The group's part of each token's output row.
    out: Vec<&'a mut [f32]>,
}

/// Buffers of one thread. Rows are `[tokens of the tile][group]`.
#[derive(Default)]
struct Scratch {
    /// Scaled queries `[rows][head_dim]`.
    queries: Vec<f32>,
    /// Scores, then softmax weights `[rows][TOKENS]`.
    scores: Vec<f32>,
    /// Unnormalised output `[rows][head_dim]`.
    values: Vec<f32>,
    /// Largest score of each row so far.
    peaks: Vec<f32>,
    /// Sum of each row's weights so far.
    totals: Vec<f32>,
}

/// What every tile of one call shares.
struct Call<'a> {
    group: usize,
    head_dim: usize,
    start: usize,
    queries: &'a [f32],
    q_row: usize,
}

impl Call<'_> {
    /// Computes one tile over its `keys` and `values` `[tokens][head_dim]`.
    fn attend(&self, scratch: &mut Scratch, mut tile: Tile, keys: &[f32], values: &[f32]) {
        let dim = self.head_dim;
        let rows = tile.out.len() * self.group;
        let scale = 1.0 / (dim as f32).sqrt();
        scratch.queries.clear();
        for token in 0..tile.out.len() {
            let at = (tile.first + token) * self.q_row + tile.head * self.group * dim;
            scratch.queries.extend(self.queries[at..][..self.group * dim].iter().map(|query| query * scale));
        }
        scratch.values.clear();
        scratch.values.resize(rows * dim, 0.0);
        scratch.peaks.clear();
        scratch.peaks.resize(rows, f32::NEG_INFINITY);
        scratch.totals.clear();
        scratch.totals.resize(rows, 0.0);
        scratch.scores.resize(rows * TOKENS, 0.0);
        for (i, (keys, values)) in keys.chunks(TOKENS * dim).zip(values.chunks(TOKENS * dim)).enumerate() {
            let tokens = keys.len() / dim;
            let scores = &mut scratch.scores[..rows * tokens];
            product(
                MatMut::from_row_major_slice_mut(scores, rows, tokens),
                Accum::Replace,
                MatRef::from_row_major_slice(&scratch.queries, rows, dim),
                MatRef::from_row_major_slice(keys, tokens, dim).transpose(),
                1.0,
                Par::Seq,
            );
            dispatch(Softmax {
                scores,
                tokens,
                group: self.group,
                query_position: self.start + tile.first,
                key_position: i * TOKENS,
                peaks: &mut scratch.peaks,
                totals: &mut scratch.totals,
                values: &mut scratch.values,
            });
            product(
                MatMut::from_row_major_slice_mut(&mut scratch.values, rows, dim),
                Accum::Add,
                MatRef::from_row_major_slice(&scratch.scores[..rows * tokens], rows, tokens),
                MatRef::from_row_major_slice(values, tokens, dim),
                1.0,
                Par::Seq,
            );
        }
        let parts = scratch.values.chunks_exact(dim).zip(&scratch.totals);
        let places = tile.out.iter_mut().flat_map(|out| out.chunks_exact_mut(dim));
        for (out, (values, total)) in places.zip(parts) {
            for (out, value) in out.iter_mut().zip(values) {
                *out = value / total;
            }
        }
    }
}

/// Turns a tile of scores into weights relative to each row's largest score so far, and rescales what the row has
/// accumulated.
struct Softmax<'a> {
    /// `[rows][tokens]`.
    scores: &'a mut [f32],
    tokens: usize,
    group: usize,
    /// Position of the first query token.
    query_position: usize,
    /// Position of the first key token.
    key_position: usize,
    peaks: &'a mut [f32],
    totals: &'a mut [f32],
    /// `[rows][head_dim]`.
    values: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let dim = self.values.len() / self.peaks.len();
        let state = self.peaks.iter_mut().zip(self.totals).zip(self.values.chunks_exact_mut(dim));
        for (row, (scores, ((peak, total), values))) in self.scores.chunks_exact_mut(self.tokens).zip(state).enumerate()
        {
            let position = self.query_position + row / self.group;
            let visible = (position + 1).saturating_sub(self.key_position).min(self.tokens);
            let (scores, masked) = scores.split_at_mut(visible);
            masked.fill(0.0);
            let tile = max(isa, scores);
            if tile > *peak {
                let kept = exp(*peak - tile);
                *total *= kept;
                values.iter_mut().for_each(|value| *value *= kept);
                *peak = tile;
            }
            let peak = *peak;
            scores.iter_mut().for_each(|score| *score = exp(*score - peak));
            *total += sum(isa, scores);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, attend, in_pool, noise};
    use super::*;

    fn check(shape: PrefillShape, chunk: usize, spare: usize) {
        let PrefillShape { q_heads, kv_heads, head_dim, start } = shape;
        let (row, capacity) = (q_heads * head_dim, start + chunk + spare);
        let q_row = row + 2 * kv_heads * head_dim;
        let queries: Vec<f32> = noise(chunk * q_row, 1).iter().map(|x| x * 4.0).collect();
        let (keys, values) = (noise(kv_heads * capacity * head_dim, 2), noise(kv_heads * capacity * head_dim, 3));
        let run = || {
            let mut out = vec![f32::NAN; chunk * row];
            prefill_attention(shape, &queries, &keys, &values, &mut out);
            out
        };
        let out = in_pool(2, run);
        assert_eq!(out, in_pool(1, run));
        for token in 0..chunk {
            for head in 0..q_heads {
                let query = &queries[token * q_row + head * head_dim..][..head_dim];
                let from = head / (q_heads / kv_heads) * capacity * head_dim;
                let seen = from..from + (start + token + 1) * head_dim;
                let expected = attend(query, &keys[seen.clone()], &values[seen], 1.0 / (head_dim as f64).sqrt());
                assert_close(&out[token * row + head * head_dim..][..head_dim], &expected, 5e-6);
            }
        }
    }

    #[test]
    fn matches_double_precision() {
        let shape = |q_heads, kv_heads, head_dim, start| PrefillShape { q_heads, kv_heads, head_dim, start };
        check(shape(1, 1, 16, 0), 1, 0);
        check(shape(4, 2, 32, 0), 5, 3);
        check(shape(3, 1, 64, 0), 300, 0);
        check(shape(8, 2, 64, 250), 70, 10);
        check(shape(2, 2, 80, 511), 140, 0);
        check(shape(6, 1, 128, 1000), 20, 0);
        check(shape(32, 1, 7, 255), 20, 1);
    }

    #[test]
    fn extreme_scores_stay_finite() {
        let shape = PrefillShape { q_heads: 1, kv_heads: 1, head_dim: 1, start: 0 };
        let mut out = [0.0; 3];
        prefill_attention(shape, &[1e19, 1e19, 1e19], &[-1e18, 0.0, 1e18], &[1.0, 2.0, 3.0], &mut out);
        assert_eq!(out, [1.0, 2.0, 3.0]);
    }
}
