//! Prefill, layer by layer: every chunk of the prompt passes a layer before the next layer begins, so that the device
//! holds the full KV of one layer only, while the layers before it are on their way to the store.

use crate::cpu::decoder::{AttentionShape, Decoder, embed};
use crate::cpu::eagle3::DraftHead;
use crate::cpu::kernels::{PrefillShape, prefill_attention};
use crate::cpu::linear::{Regime, widened};
use crate::cpu::request::Request;
use crate::weights::LayerWeights;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, SlotId, Step, TokenId};
use oasis_core::memory::{LayerCache, Resident, StoreError, Summaries};
use oasis_core::pipeline::{Offload, OffloadBlocks, Pipeline};
use oasis_core::policy::Summarizer;
use oasis_core::working_set::Admission;

/// A prompt on its way through the layers.
pub(super) struct Prefill {
    tokens: usize,
    /// Residual stream of the whole prompt, `[tokens][hidden]`.
    x: Vec<f32>,
    layer: usize,
    /// First token of the next chunk.
    start: usize,
    /// The layer's weights in 32-bit floats, where they are stored shorter.
    wide: Option<LayerWeights>,
    /// Keys and values of the current layer, `[kv_heads][tokens][head_dim]`, valid up to the current chunk.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Tapped hidden states, `[tokens][3 * hidden]`; empty without a draft head.
    taps: Vec<f32>,
    offloads: Vec<Offload>,
}

/// What a prefill needs beside the request.
pub(super) struct PrefillContext<'a> {
    pub decoder: &'a Decoder,
    pub draft: Option<&'a DraftHead>,
    pub geometry: &'a KvGeometry,
    pub summarizer: &'a dyn Summarizer,
    /// `None` in dense decoding: nothing leaves the device.
    pub pipeline: Option<&'a Pipeline>,
    /// Slots of a KV head.
    pub slots: usize,
    pub chunk: usize,
}

impl Prefill {
    pub fn new(decoder: &Decoder, draft: Option<&DraftHead>, prompt: &[TokenId]) -> Self {
        let kv_elements = decoder.attention_shape().kv_width() * prompt.len();
        Self {
            tokens: prompt.len(),
            x: embed(&decoder.weights.embed, prompt.iter().copied()),
            layer: 0,
            start: 0,
            wide: None,
            keys: vec![0.0; kv_elements],
            values: vec![0.0; kv_elements],
            taps: vec![0.0; draft.map_or(0, |d| prompt.len() * d.taps_width())],
            offloads: Vec::new(),
        }
    }

    /// Token-layers done.
    pub fn done(&self) -> usize {
        self.layer * self.tokens + self.start
    }

    /// Runs one chunk of one layer; `true` when the last layer is through.
    pub fn advance(&mut self, context: &PrefillContext<'_>, request: RequestId, caches: &mut [Option<LayerCache>], max_blocks: usize) -> bool {
        let Decoder { spec, weights, .. } = context.decoder;
        if self.start == 0 {
            self.wide = widened(&weights.layers[self.layer]);
        }
        let end = (self.start + context.chunk).min(self.tokens);
        self.tap(context.draft, spec.hidden, end);
        self.run_chunk(context.decoder, end);
        self.start = end;
        if end < self.tokens {
            return false;
        }

        caches[self.layer] = Some(self.finish_layer(context, request, max_blocks));
        self.start = 0;
        self.layer += 1;
        self.wide = None;
        self.layer == spec.layers
    }

    /// Keeps the layer's input where the draft head taps it.
    fn tap(&mut self, draft: Option<&DraftHead>, hidden: usize, end: usize) {
        let Some(draft) = draft else { return };
        for (slot, _) in draft.taps().iter().enumerate().filter(|(_, layer)| **layer == self.layer) {
            for token in self.start..end {
                let target = token * draft.taps_width() + slot * hidden;
                self.taps[target..target + hidden].copy_from_slice(&self.x[token * hidden..][..hidden]);
            }
        }
    }

    fn run_chunk(&mut self, decoder: &Decoder, end: usize) {
        let layer = self.wide.as_ref().unwrap_or(&decoder.weights.layers[self.layer]);
        let shape = decoder.attention_shape();
        let x = &mut self.x[self.start * decoder.spec.hidden..end * decoder.spec.hidden];
        let positions: Vec<usize> = (self.start..end).collect();
        let qkv = decoder.qkv(Regime::Prefill, layer, x, &positions);

        for (row, &position) in qkv.chunks_exact(shape.qkv_width()).zip(&positions) {
            let (_, key, value) = shape.split(row);
            for head in 0..shape.kv_heads {
                let from = head * shape.head_dim..(head + 1) * shape.head_dim;
                let to = (head * self.tokens + position) * shape.head_dim;
                self.keys[to..to + shape.head_dim].copy_from_slice(&key[from.clone()]);
                self.values[to..to + shape.head_dim].copy_from_slice(&value[from]);
            }
        }
        let AttentionShape { q_heads, kv_heads, head_dim, .. } = shape;
        let mut attended = vec![0.0; positions.len() * shape.q_width()];
        let prefill_shape = PrefillShape { q_heads, kv_heads, head_dim, start: self.start };
        prefill_attention(prefill_shape, &qkv, &self.keys, &self.values, &mut attended);
        decoder.finish_layer(Regime::Prefill, layer, &attended, x);
    }

    /// Cuts the layer's KV into blocks: summaries and tail stay, complete blocks go to the store, and to slots where
    /// there is one for each.
    fn finish_layer(&mut self, context: &PrefillContext<'_>, request: RequestId, max_blocks: usize) -> LayerCache {
        let geometry = *context.geometry;
        let KvGeometry { block_tokens, head_dim, .. } = geometry;
        let blocks = geometry.full_blocks(self.tokens);
        let mut resident = Resident::new(geometry, context.slots, BlockId::from(blocks));
        for token in blocks * block_tokens..self.tokens {
            let row = |cache: &[f32]| -> Vec<f32> {
                let heads = cache.chunks_exact(self.tokens * head_dim);
                heads.flat_map(|head| &head[token * head_dim..(token + 1) * head_dim]).copied().collect()
            };
            resident.tail.push(&row(&self.keys), &row(&self.values));
        }
        let Some(pipeline) = context.pipeline else {
            let summaries = Summaries::new(&geometry, 0, 0);
            self.fill_slots(&mut resident, blocks);
            return LayerCache { summaries, resident };
        };

        let mut summaries = Summaries::new(&geometry, context.summarizer.rows_per_block(), max_blocks);
        let block_elements = blocks * block_tokens * head_dim;
        let keys = self.keys.chunks_exact(self.tokens * head_dim).map(|keys| &keys[..block_elements]);
        summaries.append(&geometry, context.summarizer, keys);
        if blocks <= context.slots {
            self.fill_slots(&mut resident, blocks);
        }
        if blocks > 0 {
            let entries = (0..blocks).flat_map(|block| self.entries_of(&geometry, block)).collect();
            let layer = LayerId::from(self.layer);
            self.offloads.push(pipeline.offload(OffloadBlocks { request, layer, first: BlockId(0), entries }));
        }
        LayerCache { summaries, resident }
    }

    fn fill_slots(&self, resident: &mut Resident, blocks: usize) {
        let geometry = *resident.geometry();
        for block in 0..blocks {
            for (head, entry) in self.entries_of(&geometry, block).chunks_exact(geometry.entry_elements()).enumerate() {
                let (head, slot) = (KvHead::from(head), SlotId::from(block));
                resident.slot_mut(head, slot).copy_from_slice(entry);
                resident.set.place(head, Admission { block: BlockId::from(block), slot }, Step(0));
            }
        }
    }

    /// Entries of one block, `[kv_heads][entry]`.
    fn entries_of(&self, geometry: &KvGeometry, block: usize) -> Vec<f32> {
        let elements = geometry.block_tokens * geometry.head_dim;
        let range = block * elements..(block + 1) * elements;
        let head = self.tokens * geometry.head_dim;
        (self.keys.chunks_exact(head).zip(self.values.chunks_exact(head)))
            .flat_map(|(keys, values)| [&keys[range.clone()], &values[range.clone()]])
            .flatten()
            .copied()
            .collect()
    }

    /// Residual stream of the last token, `[hidden]`, once all layers are through.
    pub fn last_row(&self) -> &[f32] {
        &self.x[self.x.len() / self.tokens * (self.tokens - 1)..]
    }

    /// Fills the draft head's cache, up to the last position whose next token is known; gives the taps of the last.
    pub fn finish_draft(&self, head: &DraftHead, decoder: &Decoder, request: &mut Request) {
        let Some(state) = &mut request.draft else { return };
        let width = head.taps_width();
        let (known, last) = self.taps.split_at((self.tokens - 1) * width);
        head.prefill(&decoder.weights.embed, known, &request.prompt[1..], 0, &mut state.cache);
        state.taps = last.to_vec();
    }

    /// Waits until every block is in the store.
    pub fn wait_for_store(&mut self) -> Result<(), StoreError> {
        self.offloads.drain(..).try_for_each(Offload::wait)
    }
}
