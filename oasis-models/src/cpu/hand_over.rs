//! Requests that begin on one executor and go on on another.

use crate::cpu::eagle3::{DraftHead, DraftState};
use crate::cpu::executor::CpuExecutor;
use crate::cpu::request::Request;
use oasis_core::executor::{Admission, RequestError, Sequence};
use oasis_core::hand_over::{DraftHandOver, DraftWidths, HandOver, HandsOver, LayerHandOver, expect_count};
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, SlotId, Step};
use oasis_core::memory::{EntryKey, LayerCache, Resident, Summaries};
use oasis_core::pipeline::OffloadBlocks;
use oasis_core::working_set::HeldSlot;

/// Steps of a working set that a peer may name: far from where counting on would overflow.
const MAX_STEP: u64 = 1 << 60;
/// Prompts that are read in turn: each holds one layer's KV and the activations of all its tokens.
const PROMPTS_IN_TURN: usize = 8;

impl HandsOver for CpuExecutor {
    fn expect(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        self.set_aside(sequence, true)
    }

    fn take_over(&mut self, id: RequestId, state: &HandOver) -> Result<(), RequestError> {
        let Some(mut request) = self.requests.remove(&id) else {
            return Err(RequestError(format!("request {id}: expected an admitted request, found none")));
        };
        let result = self.fill(id, &mut request, state);
        self.requests.insert(id, request);
        result.map_err(|problem| RequestError(format!("request {id}: {problem}")))
    }

    fn hand_over(&mut self, id: RequestId) -> Result<HandOver, RequestError> {
        self.drain();
        let refuse = |problem: &str| Err(RequestError(format!("request {id}: {problem}")));
        match self.requests.get(&id) {
            None => return refuse("expected an admitted request, found none"),
            Some(Request { failed: Some(problem), .. }) => return refuse(problem),
            Some(request) if !request.has_read_prompt() => return refuse("its prompt has not been read yet"),
            Some(_) if self.sparse.is_none() => return refuse("expected sparse decoding, found a dense executor"),
            Some(_) => {}
        }
        self.store_dense_layers(id)?;
        let request = self.requests.remove(&id).expect("looked up above");
        self.device -= request.footprint;
        if let Some(observer) = &mut self.observer {
            observer.release(id);
        }
        let queries = request.queries.into_iter();
        let layers = request.layers.iter().flatten().zip(queries).map(|(cache, query)| self.layer_state(cache, query));
        Ok(HandOver {
            prompt_tokens: request.prompt.len(),
            steps: request.steps,
            last_step: self.last_step,
            sampler_words: request.sampler.words_drawn(),
            layers: layers.collect(),
            draft: request.draft.map(|state| {
                let [keys, values] = state.cache.rows();
                DraftHandOver { keys, values, taps: state.taps }
            }),
        })
    }

    fn prompts_in_turn(&self) -> usize {
        PROMPTS_IN_TURN
    }
}

impl CpuExecutor {
    /// Writes the blocks of layers that keep them all on the device, to be read from the store like the others.
    fn store_dense_layers(&self, id: RequestId) -> Result<(), RequestError> {
        let Some(sparse) = &self.sparse else { return Ok(()) };
        let geometry = self.info.geometry;
        let heads = || (0..geometry.kv_heads).map(KvHead::from);
        for layer in (0..sparse.dense_layers.min(geometry.layers)).map(LayerId::from) {
            let Some(cache) = &self.requests[&id].layers[layer.index()] else { continue };
            let blocks = cache.resident.tail.block().index();
            if blocks == 0 {
                continue;
            }
            // Block and slot are the same number in a dense layer.
            let entries = (0..blocks).map(SlotId::from).flat_map(|slot| heads().map(move |head| (head, slot)));
            let entries = entries.flat_map(|(head, slot)| cache.resident.slot(head, slot)).copied().collect();
            let write = sparse.pipeline.offload(OffloadBlocks { request: id, layer, first: BlockId(0), entries });
            write.wait().map_err(|error| RequestError(error.to_string()))?;
        }
        Ok(())
    }

    fn layer_state(&self, cache: &LayerCache, query: Vec<f32>) -> LayerHandOver {
        let heads = || (0..self.info.geometry.kv_heads).map(KvHead::from);
        let (tail, dim) = (&cache.resident.tail, self.info.geometry.head_dim);
        let row = |rows: &[f32], token: usize| rows[token * dim..(token + 1) * dim].to_vec();
        let token = |token| {
            let keys = heads().flat_map(move |head| row(tail.keys(head), token));
            keys.chain(heads().flat_map(move |head| row(tail.values(head), token)))
        };
        LayerHandOver {
            summaries: cache.summaries.words(self.info.geometry.kv_heads),
            tail: (0..tail.tokens()).flat_map(token).collect(),
            query,
            slots: heads().map(|head| cache.resident.set.held(head)).collect(),
        }
    }

    fn fill(&mut self, id: RequestId, request: &mut Request, state: &HandOver) -> Result<(), String> {
        if !request.is_expected {
            return Err("expected a request whose prompt is read elsewhere, found one that is read here".to_owned());
        }
        self.check(request, state)?;
        let layers = (state.layers.iter().enumerate())
            .map(|(layer, state_of)| self.layer_cache(id, LayerId::from(layer), request, state, state_of).map(Some));
        request.layers = layers.collect::<Result<_, _>>()?;
        request.queries = state.layers.iter().map(|layer| layer.query.clone()).collect();
        request.draft = state.draft.as_ref().zip(self.head()).map(|(draft, head)| {
            let positions = state.position() - 1;
            let start = self.draft_window().start(positions);
            let mut cache = head.new_cache(start, positions + 1 - start);
            cache.restore(&draft.keys, &draft.values);
            DraftState { cache, taps: draft.taps.clone(), last: None }
        });
        request.sampler.skip_to(state.sampler_words);
        (request.position, request.steps) = (state.position(), state.steps);
        request.is_expected = false;
        self.last_step = self.last_step.max(state.last_step);
        Ok(())
    }

    /// What a peer sent must fit before any of it is used.
    fn check(&self, request: &Request, state: &HandOver) -> Result<(), String> {
        expect_count("prompt tokens", request.prompt.len(), state.prompt_tokens)?;
        expect_count("layers", self.info.geometry.layers, state.layers.len())?;
        let position = state.position();
        if position > request.end() {
            return Err(format!("expected at most {} cached tokens, found {position}", request.end()));
        }
        if state.last_step > Step(MAX_STEP) {
            return Err(format!("expected a step of at most {MAX_STEP}, found {}", state.last_step));
        }
        for (layer, state_of) in state.layers.iter().enumerate() {
            let layer = LayerId::from(layer);
            let (slots, geometry) = (self.slots(layer, request.max_blocks), &self.info.geometry);
            // A tail that does not fit is refused first.
            let blocks = state_of.blocks(geometry, position).unwrap_or(0);
            let words = geometry.kv_heads * blocks * self.summary_words(layer);
            let newest = state_of.slots.iter().flatten().map(|held| held.last_selected).max();
            state_of.check(geometry, position, slots, words).map_err(|problem| format!("layer {layer}: {problem}"))?;
            if newest > Some(state.last_step) {
                return Err(format!("layer {layer}: expected no step after {}, found a later one", state.last_step));
            }
        }
        let blocks = self.draft_window().blocks;
        let widths = |head: &DraftHead| DraftWidths { token: head.kv_width(), taps: head.taps_width(), blocks };
        state.check_draft(&self.info.geometry, self.head().map(widths))
    }

    /// Words of a block's summary in one KV head of a layer.
    fn summary_words(&self, layer: LayerId) -> usize {
        self.sparse_at(layer).map_or(0, |s| Summaries::block_words(&self.info.geometry, &*s.summarizer))
    }

    fn layer_cache(
        &self,
        id: RequestId,
        layer: LayerId,
        request: &Request,
        state: &HandOver,
        state_of: &LayerHandOver,
    ) -> Result<LayerCache, String> {
        let geometry = self.info.geometry;
        let blocks = state_of.blocks(&geometry, state.position()).expect("checked before");
        let slots = self.slots(layer, request.max_blocks);
        let mut resident = Resident::new(geometry, slots, BlockId::from(blocks));
        let width = geometry.kv_heads * geometry.head_dim;
        for token in state_of.tail.chunks_exact(2 * width) {
            let (keys, values) = token.split_at(width);
            resident.tail.push(keys, values);
        }
        let mut summaries = Summaries::none();
        if let Some(sparse) = self.sparse_at(layer) {
            summaries = Summaries::new(&geometry, &*sparse.summarizer, request.max_blocks);
            summaries.restore(blocks, &state_of.summaries);
        }

        let heads = state_of.slots.iter().enumerate().map(|(head, held)| (KvHead::from(head), held));
        let places: Vec<_> = heads.flat_map(|(head, held)| held.iter().map(move |held| (head, *held))).collect();
        let key = |&(head, HeldSlot { block, .. }): &(KvHead, HeldSlot)| EntryKey { request: id, layer, block, head };
        let Some(sparse) = self.sparse.as_ref().filter(|_| !places.is_empty()) else {
            return Ok(LayerCache { summaries, resident });
        };
        let fetched = sparse.pipeline.fetch(places.iter().map(key).collect()).map_err(|error| error.to_string())?;
        for ((head, held), entry) in places.into_iter().zip(&fetched.entries) {
            bytemuck::cast_slice_mut(resident.slot_mut(head, held.slot)).copy_from_slice(entry.bytes());
            resident.set.restore(head, held);
        }
        Ok(LayerCache { summaries, resident })
    }
}
