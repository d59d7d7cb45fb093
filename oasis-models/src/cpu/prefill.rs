//! Prefill, layer by layer: every chunk of the prompt passes a layer before the next layer begins, so that the device
//! holds the full KV of one layer only, while the layers before it are on their way to the store.

use crate::cpu::decoder::{AttentionShape, Decoder, embed};
use crate::cpu::eagle3::{DraftHead, DraftState};
use crate::cpu::kernels::{PrefillShape, prefill_attention};
use crate::cpu::layer_kv::LayerKv;
use crate::cpu::linear::{Regime, widened};
use crate::cpu::model::CpuModel;
use crate::cpu::rotation::Rotation;
use crate::weights::LayerWeights;
use oasis_core::ids::{LayerId, TokenId};

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
    /// Keys and values of the current layer, valid up to the current chunk.
    kv: LayerKv,
    /// Tapped hidden states, `[tokens][3 * hidden]`; empty without a draft head.
    taps: Vec<f32>,
}

impl Prefill {
    /// A prompt before the first layer; `draft` is the head whose taps are to be kept.
    pub fn new(decoder: &Decoder, draft: Option<&DraftHead>, prompt: &[TokenId]) -> Self {
        Self {
            tokens: prompt.len(),
            x: embed(&decoder.weights.embed, prompt.iter().copied()),
            layer: 0,
            start: 0,
            wide: None,
            kv: empty_kv(decoder, prompt.len()),
            taps: vec![0.0; draft.map_or(0, |d| prompt.len() * d.taps_width())],
        }
    }

    /// Token-layers done.
    pub fn done(&self) -> usize {
        self.layer * self.tokens + self.start
    }

    /// Whether all layers are through.
    pub fn is_done(&self, decoder: &Decoder) -> bool {
        self.layer == decoder.spec.layers
    }

    /// Runs one chunk of at most `chunk` tokens through the current layer; gives the layer's KV after its last chunk.
    pub fn advance(
        &mut self,
        decoder: &Decoder,
        draft: Option<&DraftHead>,
        chunk: usize,
    ) -> Option<(LayerId, LayerKv)> {
        if self.start == 0 {
            self.wide = widened(&decoder.weights.layers[self.layer]);
        }
        let end = (self.start + chunk).min(self.tokens);
        self.tap(draft, decoder.spec.hidden, end);
        self.run_chunk(decoder, end);
        self.start = end;
        (end == self.tokens).then(|| {
            let layer = LayerId::from(self.layer);
            self.start = 0;
            self.layer += 1;
            self.wide = None;
            let next = if self.is_done(decoder) { 0 } else { self.tokens };
            (layer, std::mem::replace(&mut self.kv, empty_kv(decoder, next)))
        })
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
        let rotation = Rotation::at(&decoder.rope, self.start..end);
        let qkv = decoder.qkv(Regime::Prefill, layer, x, &rotation);

        let AttentionShape { q_heads, kv_heads, head_dim, .. } = shape;
        for (row, position) in qkv.chunks_exact(shape.qkv_width()).zip(self.start..) {
            let (_, key, value) = shape.split(row);
            for head in 0..kv_heads {
                let from = head * head_dim..(head + 1) * head_dim;
                let to = (head * self.tokens + position) * head_dim;
                self.kv.keys[to..to + head_dim].copy_from_slice(&key[from.clone()]);
                self.kv.values[to..to + head_dim].copy_from_slice(&value[from]);
            }
        }
        let mut attended = vec![0.0; (end - self.start) * shape.q_width()];
        let prefill_shape = PrefillShape { q_heads, kv_heads, head_dim, start: self.start };
        prefill_attention(prefill_shape, &qkv, &self.kv.keys, &self.kv.values, &mut attended);
        decoder.finish_layer(Regime::Prefill, layer, &attended, x);
    }

    /// Logits of the last token, `[vocab]`, once all layers are through.
    pub fn logits(&self, decoder: &Decoder) -> Vec<f32> {
        decoder.logits(&self.x[(self.tokens - 1) * decoder.spec.hidden..])
    }

    /// The draft head's state once all layers are through: its cache from position `start` up to the last one whose next
    /// token is known, and the taps of the position after that.
    pub fn draft_state(&self, head: &DraftHead, decoder: &Decoder, prompt: &[TokenId], start: usize) -> DraftState {
        let (known, last) = self.taps.split_at((self.tokens - 1) * head.taps_width());
        let mut cache = head.new_cache(start, self.tokens - start);
        head.prefill(
            &decoder.weights.embed,
            &known[start * head.taps_width()..],
            &prompt[1 + start..],
            start,
            &mut cache,
        );
        DraftState { cache, taps: last.to_vec(), last: None }
    }
}

fn empty_kv(decoder: &Decoder, tokens: usize) -> LayerKv {
    let elements = decoder.attention_shape().kv_width() * tokens;
    LayerKv { tokens, keys: vec![0.0; elements], values: vec![0.0; elements] }
}

/// A prompt that has been read: the full KV of every layer, so that one prefill can serve several executors.
pub struct PromptState {
    pub(super) prompt: Vec<TokenId>,
    pub(super) layers: Vec<LayerKv>,
    pub(super) logits: Vec<f32>,
    pub(super) draft: Option<DraftState>,
}

impl PromptState {
    /// Reads a prompt in chunks of at most `chunk` tokens; `progress` hears of token-layers done, and of all.
    ///
    /// # Panics
    /// When the prompt is empty, longer than the model's context, or has a token the model does not know, or a chunk has
    /// no tokens.
    pub fn read(model: &CpuModel, prompt: &[TokenId], chunk: usize, progress: &mut dyn FnMut(usize, usize)) -> Self {
        assert!((1..=model.spec().max_positions).contains(&prompt.len()), "a prompt has 1 to max_positions tokens");
        assert!(chunk > 0, "a chunk has at least one token");
        let (decoder, draft) = (&model.decoder, model.draft.as_ref());
        let mut prefill = Prefill::new(decoder, draft, prompt);
        let mut layers = Vec::with_capacity(decoder.spec.layers);
        while !prefill.is_done(decoder) {
            layers.extend(prefill.advance(decoder, draft, chunk).map(|(_, kv)| kv));
            progress(prefill.done(), decoder.spec.layers * prompt.len());
        }
        let draft = draft.map(|head| prefill.draft_state(head, decoder, prompt, 0));
        Self { prompt: prompt.to_vec(), layers, logits: prefill.logits(decoder), draft }
    }

    /// Tokens of the prompt.
    pub fn tokens(&self) -> usize {
        self.prompt.len()
    }

    /// Logits of the prompt's last token, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }
}
