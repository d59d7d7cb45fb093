//! Requests that begin on one GPU and go on on another.
//!
//! Where a request's state lies, and what becomes of it:
//!
//! | state | on the device | in a [`HandOver`] |
//! |---|---|---|
//! | complete blocks | in the store, entries in the layout of the kernels | not in it: read from the store |
//! | working set | `LayerSets::slots` | not in it: its blocks are fetched from the store, to the same slots |
//! | which block a slot holds, and its history | `slot_block`, `last_selected`, `times_selected` | [`LayerHandOver::slots`] |
//! | the block being filled | `tail`, at its number's parity; bf16, swizzled | [`LayerHandOver::tail`], f32 |
//! | summaries | `summaries`, tiles of 16 blocks | [`LayerHandOver::summaries`], `[kv_heads][tiles]` whole tiles as they are |
//! | KV of the draft head | `DraftMemory::entries`, the row's pages | [`DraftHandOver`], f32 |
//! | queries of the last step, where choices are corrected | `CorrectionMemory`, bf16 | [`LayerHandOver::query`], f32 |
//! | taps of the last position | `DraftMemory::taps`, bf16 | [`DraftHandOver::taps`], f32 |
//! | position | `Request`; a kernel's input | [`HandOver::prompt_tokens`] and [`HandOver::steps`] |
//! | step of the newest choice | `Memory::step`, of all rows | [`HandOver::last_step`] |
//! | sampling | parameters of the row; noise is a hash of seed, position and token | nothing: `sampler_words` is 0 |
//! | scores, lists of copies, activations | scratch of a step | nothing |
//!
//! A block that the step before completed is summarised already when its selection is still to come, as with
//! `QuerySource::Exact` and `QuerySource::PreviousLayer`: the tail is full then, and the tiles have one block more than the store.

mod fit;
mod pack;

use super::CudaExecutor;
use super::request::{Phase, Request};
use crate::device::{DeviceBuffer, DeviceError};
use crate::layout::{BLOCK_TOKENS, entry_bytes};
use anyhow::{Context, bail, ensure};
use fit::{Fit, Place};
use half::bf16;
use oasis_core::executor::{Admission, RequestError, Sequence};
use oasis_core::hand_over::{DraftHandOver, DraftWidths, HandOver, HandsOver, LayerHandOver};
use oasis_core::ids::{BlockId, LayerId, RequestId, SlotId, Step};
use oasis_core::working_set::HeldSlot;
use pack::{read_rows, read_tail, roll, unroll, write_rows, write_tail};

impl HandsOver for CudaExecutor {
    fn expect(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        self.check_hands_over()?;
        self.set_aside(sequence, true)
    }

    fn take_over(&mut self, id: RequestId, state: &HandOver) -> Result<(), RequestError> {
        self.try_take_over(id, state).map_err(|error| RequestError(format!("request {id}: {error:#}")))
    }

    fn hand_over(&mut self, id: RequestId) -> Result<HandOver, RequestError> {
        if let Some(Request { phase: Phase::Failed(problem), .. }) = self.requests.get(&id) {
            return Err(RequestError(problem.clone()));
        }
        self.try_hand_over(id).map_err(|error| RequestError(format!("request {id}: {error:#}")))
    }
}

impl CudaExecutor {
    /// Another executor reads blocks from the store, and working sets of policies of the host are not on the device.
    fn check_hands_over(&self) -> anyhow::Result<()> {
        ensure!(
            self.parts.store_link.is_some() && self.parts.host_side.is_none(),
            "handing requests over: expected KV that goes through a store and policies with device code, found {}",
            self.info.device
        );
        Ok(())
    }

    fn fit(&self) -> Fit {
        let draft = self.parts.model.head.as_ref().filter(|_| self.parts.memory.draft.is_some());
        Fit {
            geometry: self.info.geometry,
            slots: self.parts.extent.slots,
            tile_bytes: self.parts.tile_bytes(),
            lag: usize::from(self.parts.chooses_first()),
            query: match self.parts.memory.sparse.as_ref().is_some_and(|sparse| sparse.correction.is_some()) {
                true => self.info.geometry.q_heads * self.info.geometry.head_dim,
                false => 0,
            },
            draft: draft.map(|head| DraftWidths {
                token: head.spec.kv_heads * head.spec.head_dim,
                taps: 3 * head.spec.target_hidden,
                blocks: Some(self.parts.extent.draft_blocks),
            }),
        }
    }

    fn try_hand_over(&mut self, id: RequestId) -> anyhow::Result<HandOver> {
        self.check_hands_over()?;
        let request = self.requests.get(&id).context("expected an admitted request, found none")?;
        match request.phase {
            Phase::Decode => {}
            Phase::First => bail!("its first decode step has not been run yet"),
            _ => bail!("its prompt has not been read yet"),
        }
        let (row, place) = (request.row, self.fit().place(request.position));
        // Slots are as the tables say, and what the last step completed is in the store.
        self.settle()?;
        let failure = self.parts.store_link.as_ref().and_then(|link| link.borrow().failure(row));
        if let Some(problem) = failure {
            bail!(problem);
        }
        let layers = (0..self.parts.layers()).map(|layer| self.layer_state(layer, row, place));
        let (layers, draft) = (layers.collect::<Result<Vec<_>, _>>()?, self.draft_state(row, place)?);
        let last_step = Step(u64::from(self.parts.memory.step.read()?[0]));
        let request = self.requests.remove(&id).expect("looked up above");
        self.vacate(id, &request);
        if let Some(link) = &self.parts.store_link {
            link.borrow_mut().forget(id);
        }
        let steps = (request.position - request.prompt) as u64;
        Ok(HandOver { prompt_tokens: request.prompt, steps, last_step, sampler_words: 0, layers, draft })
    }

    fn layer_state(&self, layer: usize, row: usize, place: Place) -> Result<LayerHandOver, DeviceError> {
        let Some(sparse) = &self.parts.memory.sparse else { return Ok(LayerHandOver::default()) };
        let (sets, geometry) = (&sparse.layers[layer], &self.info.geometry);
        let (kv_heads, head_dim, slots) = (geometry.kv_heads, geometry.head_dim, self.parts.extent.slots);
        let (pair, entry) = (row * kv_heads, entry_bytes(head_dim));
        let table = |table: &DeviceBuffer<u32>| table.read_at(pair * slots, kv_heads * slots);
        let blocks = sets.slot_block.read_at(pair * slots, kv_heads * slots)?;
        let (last, times) = (table(&sets.last_selected)?, table(&sets.times_selected)?);
        let held = |index: usize| {
            let block = BlockId(u32::try_from(blocks[index]).ok()?);
            let (last_selected, times_selected) = (Step(u64::from(last[index])), times[index]);
            Some(HeldSlot { slot: SlotId::from(index % slots), block, last_selected, times_selected })
        };
        let slots = (0..kv_heads).map(|head| (head * slots..(head + 1) * slots).filter_map(held).collect()).collect();
        let tails = sets.tail.read_at(pair * 2 * entry, kv_heads * 2 * entry)?;
        let (tile, mut summaries) = (self.parts.tile_bytes(), Vec::new());
        for head in (pair..pair + kv_heads).filter(|_| place.tiles() * tile > 0) {
            let tiles = sets.summaries.read_at(head * self.parts.extent.tiles * tile, place.tiles() * tile)?;
            summaries.extend(tiles.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)));
        }
        let tail = read_tail(&tails, place.tail(), place.tail_tokens(), kv_heads, head_dim);
        let query = sparse.correction.as_ref().map(|correction| correction.queries(layer, row)).transpose()?;
        Ok(LayerHandOver { summaries, tail, query: query.unwrap_or_default(), slots })
    }

    fn draft_state(&self, row: usize, place: Place) -> Result<Option<DraftHandOver>, DeviceError> {
        let (Some(head), Some(draft)) = (&self.parts.model.head, &self.parts.memory.draft) else { return Ok(None) };
        let (spec, ring) = (&head.spec, self.parts.extent.draft_blocks);
        let page = spec.kv_heads * entry_bytes(spec.head_dim);
        let pages = draft.entries.read_at(row * ring * page, ring * page)?;
        let (start, positions) = self.draft_positions(place);
        let entries = unroll(&pages, page, start / BLOCK_TOKENS..positions.div_ceil(BLOCK_TOKENS));
        let [keys, values] = read_rows(&entries, positions - start, spec.kv_heads, spec.head_dim);
        let width = 3 * spec.target_hidden;
        let taps = draft.taps.read_at(row * width, width)?.into_iter().map(bf16::to_f32).collect();
        Ok(Some(DraftHandOver { keys, values, taps }))
    }

    /// First position that the draft head keeps, and the one that it has not seen yet: that of the newest token.
    fn draft_positions(&self, place: Place) -> (usize, usize) {
        let positions = place.position - 1;
        (self.info.geometry.window_start(positions, Some(self.parts.extent.draft_blocks)), positions)
    }

    fn try_take_over(&mut self, id: RequestId, state: &HandOver) -> anyhow::Result<()> {
        let request = self.requests.get(&id).context("expected an admitted request, found none")?;
        ensure!(
            request.phase == Phase::Expected,
            "expected a request whose prompt is read elsewhere, found one that is read here"
        );
        let (row, fit) = (request.row, self.fit());
        fit.check(request.prompt, request.end, state).map_err(anyhow::Error::msg)?;
        let place = fit.place(state.position());
        // The row's tables are set on another stream than what is written here.
        self.parts.device.synchronize()?;
        let step = self.parts.memory.step.read()?[0];
        let last_step = u32::try_from(state.last_step.0).expect("checked above");
        self.parts.memory.step.write(&[step.max(last_step)])?;
        for (layer, state_of) in state.layers.iter().enumerate() {
            self.restore_layer(id, (layer, row), place, state_of)?;
        }
        self.parts.streams.offload.synchronize()?;
        if let Some(draft) = &state.draft {
            self.restore_draft(row, place, draft)?;
        }
        let request = self.requests.get_mut(&id).expect("looked up above");
        (request.position, request.phase) = (place.position, Phase::Decode);
        Ok(())
    }

    fn restore_layer(
        &mut self,
        id: RequestId,
        (layer, row): (usize, usize),
        place: Place,
        state: &LayerHandOver,
    ) -> anyhow::Result<()> {
        let geometry = self.info.geometry;
        let (kv_heads, head_dim) = (geometry.kv_heads, geometry.head_dim);
        let (slots, tiles, tile) = (self.parts.extent.slots, self.parts.extent.tiles, self.parts.tile_bytes());
        let (pair, entry) = (row * kv_heads, entry_bytes(head_dim));
        let sparse = self.parts.memory.sparse.as_mut().context("expected sparse decoding, found a dense executor")?;
        if let Some(correction) = &mut sparse.correction {
            correction.restore(layer, row, &state.query)?;
        }
        let sets = &mut sparse.layers[layer];

        let mut blocks = vec![-1_i32; kv_heads * slots];
        let (mut last, mut times) = (vec![0_u32; kv_heads * slots], vec![0_u32; kv_heads * slots]);
        for (head, held) in state.slots.iter().enumerate() {
            for HeldSlot { slot, block, last_selected, times_selected } in held {
                let index = head * slots + slot.index();
                (blocks[index], times[index]) = (block.0 as i32, *times_selected);
                last[index] = u32::try_from(last_selected.0).expect("checked before");
            }
        }
        sets.slot_block.write_at(pair * slots, &blocks)?;
        sets.last_selected.write_at(pair * slots, &last)?;
        sets.times_selected.write_at(pair * slots, &times)?;

        sets.tail.write_at(pair * 2 * entry, &write_tail(&state.tail, place.tail(), kv_heads, head_dim))?;
        let words = state.summaries.len() / kv_heads;
        for (head, words) in state.summaries.chunks_exact(words.max(1)).enumerate() {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            sets.summaries.write_at((pair + head) * tiles * tile, &bytes)?;
        }
        let to = sets.slots.address().offset(pair * slots * entry);
        self.parts.bring_slots(id, LayerId::from(layer), &state.slots, to)
    }

    fn restore_draft(&mut self, row: usize, place: Place, state: &DraftHandOver) -> Result<(), DeviceError> {
        let (first, ring) = (self.draft_positions(place).0 / BLOCK_TOKENS, self.parts.extent.draft_blocks);
        let (Some(head), Some(draft)) = (&self.parts.model.head, &mut self.parts.memory.draft) else { return Ok(()) };
        let spec = &head.spec;
        let page = spec.kv_heads * entry_bytes(spec.head_dim);
        let entries = write_rows(&state.keys, &state.values, spec.kv_heads, spec.head_dim);
        draft.entries.write_at(row * ring * page, &roll(&entries, page, first, ring))?;
        let taps: Vec<bf16> = state.taps.iter().copied().map(bf16::from_f32).collect();
        draft.taps.write_at(row * 3 * spec.target_hidden, &taps)
    }
}
