//! The EAGLE-3 head's arithmetic and its own KV cache.

use crate::cpu::decoder::{AttentionShape, embed, project_qkv};
use crate::cpu::kernels::{KvRun, decode_attention, rms_norm};
use crate::cpu::linear::{Regime, linear, widen};
use crate::cpu::mlp::gated_mlp;
use crate::cpu::rotation::Rotation;
use crate::draft::{Eagle3Head, Eagle3Weights};
use crate::rope::RotaryEmbedding;
use crate::weights::Matrix;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::TokenId;
use rayon::prelude::*;
use std::sync::Arc;

/// Positions of one run of the head's attention: short enough to be spread over threads.
const RUN_POSITIONS: usize = 64;

/// A head that drafts for one target.
pub(super) struct DraftHead {
    head: Arc<Eagle3Head>,
    rope: RotaryEmbedding,
    /// Target layers whose input is tapped.
    taps: [usize; 3],
}

/// The newest blocks of the head's own KV, which it keeps and attends to.
#[derive(Debug, Clone, Copy)]
pub(super) struct DraftWindow {
    pub geometry: KvGeometry,
    /// `None`: all.
    pub blocks: Option<usize>,
}

impl DraftWindow {
    /// First of `positions` positions that is kept.
    pub fn start(&self, positions: usize) -> usize {
        self.geometry.window_start(positions, self.blocks)
    }
}

/// Keys and values of the head, one row a target position.
#[derive(Debug, Clone)]
pub(super) struct DraftCache {
    /// Position of the first row: those before it have left the window.
    start: usize,
    head_dim: usize,
    /// One vector a KV head, `[positions][head_dim]`.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl DraftCache {
    fn push(&mut self, shape: AttentionShape, keys: &[f32], values: &[f32]) {
        for (cache, key) in self.keys.iter_mut().zip(keys.chunks_exact(shape.head_dim)) {
            cache.extend_from_slice(key);
        }
        for (cache, value) in self.values.iter_mut().zip(values.chunks_exact(shape.head_dim)) {
            cache.extend_from_slice(value);
        }
    }

    /// Keys and values of all heads, `[kv_heads][positions][head_dim]` each.
    pub fn rows(&self) -> [Vec<f32>; 2] {
        [self.keys.concat(), self.values.concat()]
    }

    /// Takes over what [`rows`](Self::rows) gave.
    pub fn restore(&mut self, keys: &[f32], values: &[f32]) {
        let heads = self.keys.len();
        for (cache, rows) in [(&mut self.keys, keys), (&mut self.values, values)] {
            for (cache, rows) in cache.iter_mut().zip(rows.chunks_exact((rows.len() / heads).max(1))) {
                cache.extend_from_slice(rows);
            }
        }
    }

    /// Drops what has left the window.
    pub fn slide(&mut self, window: DraftWindow) {
        let positions = self.start + self.keys[0].len() / self.head_dim;
        let dropped = window.start(positions).saturating_sub(self.start);
        if dropped > 0 {
            for cache in self.keys.iter_mut().chain(&mut self.values) {
                cache.drain(..dropped * self.head_dim);
            }
            self.start += dropped;
        }
    }

    fn runs(&self, shape: AttentionShape, head: usize) -> Vec<KvRun<'_>> {
        let run = RUN_POSITIONS * shape.head_dim;
        (self.keys[head].chunks(run).zip(self.values[head].chunks(run)))
            .map(|(keys, values)| KvRun { keys, values, first_query: 0 })
            .collect()
    }
}

/// State of a request's draft head.
#[derive(Clone)]
pub(super) struct DraftState {
    pub cache: DraftCache,
    /// Target taps of the last position, `[3 * target_hidden]`, not yet in the cache: the token after it was not known.
    pub taps: Vec<f32>,
    /// Draft logits of the last step, `[draft_vocab]`, and the guess they gave.
    pub last: Option<(Vec<f32>, TokenId)>,
}

/// One request's row of a draft step.
pub(super) struct DraftRow<'a> {
    /// The target's tapped hidden states at `position`, `[3 * target_hidden]`.
    pub taps: &'a [f32],
    /// Token at `position + 1`.
    pub token: TokenId,
    pub position: usize,
    pub cache: &'a mut DraftCache,
}

impl DraftHead {
    /// `layers` are the target's; the head's taps have been checked against them when it was loaded.
    pub fn new(head: Arc<Eagle3Head>, layers: usize) -> Self {
        let rope = RotaryEmbedding::new(&head.spec.rope, head.spec.head_dim);
        let taps = head.spec.taps.unwrap_or([2, layers / 2, layers.saturating_sub(3)]);
        Self { head, rope, taps }
    }

    pub fn head(&self) -> &Eagle3Head {
        &self.head
    }

    pub fn taps(&self) -> [usize; 3] {
        self.taps
    }

    /// Elements of one row's taps.
    pub fn taps_width(&self) -> usize {
        3 * self.head.spec.target_hidden
    }

    /// Bytes of weights that one step reads.
    pub fn weight_bytes(&self) -> u64 {
        let Eagle3Weights { fc, attention, mlp, lm_head, .. } = &self.head.weights;
        [fc, &attention.qkv, &attention.o, &mlp.gate_up, &mlp.down, lm_head].map(Matrix::bytes).iter().sum()
    }

    /// Bytes of the cache for one position.
    pub fn bytes_per_token(&self) -> usize {
        2 * self.shape().kv_width() * size_of::<f32>()
    }

    /// A cache whose first row will be that of position `start`, with room for `positions` rows.
    pub fn new_cache(&self, start: usize, positions: usize) -> DraftCache {
        let spec = &self.head.spec;
        let empty = || (0..spec.kv_heads).map(|_| Vec::with_capacity(positions * spec.head_dim)).collect();
        DraftCache { start, head_dim: spec.head_dim, keys: empty(), values: empty() }
    }

    /// Elements of the keys of one position, and of its values.
    pub fn kv_width(&self) -> usize {
        self.shape().kv_width()
    }

    fn shape(&self) -> AttentionShape {
        let spec = &self.head.spec;
        AttentionShape {
            q_heads: spec.q_heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            norm_eps: spec.norm_eps,
        }
    }

    /// The two normalised halves side by side, `[rows][2 * hidden]`, and the residual `fc(taps)`.
    fn inputs(
        &self,
        regime: Regime,
        fc: &Matrix,
        target_embed: &Matrix,
        taps: &[f32],
        tokens: &[TokenId],
    ) -> (Vec<f32>, Vec<f32>) {
        let (spec, weights) = (&self.head.spec, &self.head.weights);
        let mut residual = vec![0.0; tokens.len() * spec.hidden];
        linear(regime, fc, None, taps, &mut residual, false);
        let embedded = embed(weights.embed.as_ref().unwrap_or(target_embed), tokens.iter().copied());
        let mut both = vec![0.0; tokens.len() * 2 * spec.hidden];
        for (row, both) in both.chunks_exact_mut(2 * spec.hidden).enumerate() {
            let (e, g) = both.split_at_mut(spec.hidden);
            let range = row * spec.hidden..(row + 1) * spec.hidden;
            rms_norm(&embedded[range.clone()], &weights.input_norm, spec.norm_eps, e);
            rms_norm(&residual[range], &weights.hidden_norm, spec.norm_eps, g);
        }
        (both, residual)
    }

    /// Fills the cache with rows `start ..`: taps of each position with the token after it. Only keys and values of
    /// the single layer survive a prefill, and they need no attention.
    pub fn prefill(
        &self,
        target_embed: &Matrix,
        taps: &[f32],
        next_tokens: &[TokenId],
        start: usize,
        cache: &mut DraftCache,
    ) {
        const CHUNK: usize = 512;
        let fc = widen(&self.head.weights.fc);
        let attention = &self.head.weights.attention;
        let projection = widen(&attention.qkv);
        let (shape, width) = (self.shape(), self.taps_width());
        for (chunk, tokens) in next_tokens.chunks(CHUNK).enumerate() {
            let first = chunk * CHUNK;
            let taps = &taps[first * width..(first + tokens.len()) * width];
            let (both, _) = self.inputs(Regime::Prefill, &fc, target_embed, taps, tokens);
            let rotation = Rotation::at(&self.rope, (0..tokens.len()).map(|i| start + first + i));
            let qkv = project_qkv(Regime::Prefill, shape, &projection, attention, &rotation, &both);
            for row in qkv.chunks_exact(shape.qkv_width()) {
                let (_, keys, values) = shape.split(row);
                cache.push(shape, keys, values);
            }
        }
    }

    /// Appends one row a request and gives the draft logits `[rows][draft_vocab]`.
    pub fn step(&self, target_embed: &Matrix, rows: &mut [DraftRow<'_>], window: DraftWindow) -> Vec<f32> {
        let (spec, weights, shape) = (&self.head.spec, &self.head.weights, self.shape());
        let taps: Vec<f32> = rows.iter().flat_map(|r| r.taps).copied().collect();
        let tokens: Vec<TokenId> = rows.iter().map(|r| r.token).collect();
        let rotation = Rotation::at(&self.rope, rows.iter().map(|r| r.position));
        let (both, mut x) = self.inputs(Regime::Decode, &weights.fc, target_embed, &taps, &tokens);
        let qkv = project_qkv(Regime::Decode, shape, &weights.attention.qkv, &weights.attention, &rotation, &both);

        for (row, qkv) in rows.iter_mut().zip(qkv.chunks_exact(shape.qkv_width())) {
            let (_, keys, values) = shape.split(qkv);
            row.cache.push(shape, keys, values);
            row.cache.slide(window);
        }
        let mut attended = vec![0.0; rows.len() * shape.q_width()];
        let group = shape.q_width() / shape.kv_heads;
        attended.par_chunks_exact_mut(group).enumerate().for_each(|(i, out)| {
            let (row, head) = (i / shape.kv_heads, i % shape.kv_heads);
            let queries = &shape.split(&qkv[row * shape.qkv_width()..][..shape.qkv_width()]).0[head * group..][..group];
            decode_attention(queries, shape.head_dim, &rows[row].cache.runs(shape, head), shape.scale(), out);
        });

        linear(Regime::Decode, &weights.attention.o, None, &attended, &mut x, true);
        let mut normed = vec![0.0; x.len()];
        rms_norm(&x, &weights.post_attention_norm, spec.norm_eps, &mut normed);
        gated_mlp(Regime::Decode, &weights.mlp, &normed, &mut x, true);
        rms_norm(&x, &weights.norm, spec.norm_eps, &mut normed);
        let mut logits = vec![0.0; rows.len() * spec.draft_vocab];
        linear(Regime::Decode, &weights.lm_head, None, &normed, &mut logits, false);
        logits
    }

    /// The target token that draft logits of one row guess.
    pub fn guess(&self, logits: &[f32]) -> TokenId {
        let best = (logits.iter().enumerate()).fold(0, |best, (i, &l)| if l > logits[best] { i } else { best });
        TokenId(self.head.weights.target_ids.as_ref().map_or(best as u32, |ids| ids[best]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::geometry::KvDtype;

    #[test]
    fn a_cache_keeps_the_newest_blocks() {
        let geometry =
            KvGeometry { layers: 1, q_heads: 2, kv_heads: 2, head_dim: 2, block_tokens: 4, dtype: KvDtype::F32 };
        let shape = AttentionShape { q_heads: 2, kv_heads: 2, head_dim: 2, norm_eps: 0.0 };
        for blocks in [Some(1), Some(3), None] {
            let window = DraftWindow { geometry, blocks };
            let empty = || vec![Vec::new(); 2];
            let mut cache = DraftCache { start: 0, head_dim: 2, keys: empty(), values: empty() };
            for position in 0..30_u16 {
                let row = [0.0, 0.25, 0.5, 0.75].map(|part| f32::from(position) + part);
                cache.push(shape, &row, &row.map(|x| -x));
                cache.slide(window);
                // The block of this position, and those before it that there is room for.
                let first =
                    position / 4 * 4 - blocks.map_or(position / 4 * 4, |b| 4 * (b as u16 - 1)).min(position / 4 * 4);
                for (head, part) in [(0, 0.0), (1, 0.5)] {
                    let seen: Vec<f32> = cache.runs(shape, head).iter().flat_map(|run| run.keys).copied().collect();
                    let expected: Vec<f32> = (first..=position)
                        .flat_map(|position| [part, part + 0.25].map(|part| f32::from(position) + part))
                        .collect();
                    assert_eq!(seen, expected, "{blocks:?}, {position}");
                }
            }
        }
    }
}
