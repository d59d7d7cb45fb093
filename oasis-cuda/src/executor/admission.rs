//! Taking a request in: a row, host memory, tables.

use super::request::{Phase, Request};
use super::scope::HostLayers;
use super::{CudaExecutor, sampler};
use crate::device::DeviceError;
use crate::layout::{BLOCK_TOKENS, entry_bytes};
use oasis_core::executor::{Admission, Sequence};
use oasis_core::geometry::{KvFootprint, KvGeometry};
use oasis_core::ids::RequestId;
use oasis_core::memory::Reservation;
use oasis_core::sampling::SamplingParams;

impl CudaExecutor {
    pub(super) fn footprint(&self, blocks: usize, prompt: usize) -> KvFootprint {
        let KvGeometry { layers, kv_heads, .. } = self.info.geometry;
        let entry = entry_bytes(self.info.geometry.head_dim);
        let plan = &self.parts.plan.request;
        let resident = match self.info.budget_blocks {
            Some(budget) => budget.min(blocks) + 2,
            None => blocks,
        };
        let extent = &self.parts.extent;
        let share = |bytes: u64, most: usize| bytes * blocks.min(most) as u64 / most as u64;
        KvFootprint {
            working_set: (layers * kv_heads * resident * entry) as u64,
            summaries: share(plan.summaries, extent.blocks),
            draft: share(plan.draft, extent.draft_blocks),
            prefill: match self.info.budget_blocks {
                Some(_) => (prompt.div_ceil(BLOCK_TOKENS) * kv_heads * entry * self.parts.plan.prefill_layers) as u64,
                None => 0,
            },
        }
    }

    /// A request's host memory.
    pub(super) fn host_layers(&self, id: RequestId, request: &Request) -> Option<HostLayers> {
        let address = self.parts.full_kv(id)?;
        let block = self.info.geometry.block_bytes();
        Some(HostLayers { address, stride: request.blocks * block, bytes: request.prompt / BLOCK_TOKENS * block })
    }

    /// Makes a row's tables those of a new request.
    pub(super) fn prepare_row(&mut self, id: RequestId, row: usize, blocks: usize) -> Result<(), DeviceError> {
        let layers = self.parts.layers();
        let block = self.info.geometry.block_bytes();
        let (rows, kv_heads, slots) = (self.rows.len(), self.info.geometry.kv_heads, self.parts.extent.slots);
        let Some(base) = self.parts.full_kv(id) else { return Ok(()) };
        for layer in 0..layers {
            self.parts.memory.shared.hosts()[layer * rows + row] = base.offset(layer * blocks * block).0;
        }
        if let Some(side) = &self.parts.host_side {
            side.borrow_mut().rows.admit(row, id, base, blocks * block);
        }
        let stream = &self.parts.streams.foreground;
        let Some(sparse) = &self.parts.memory.sparse else { return Ok(()) };
        let from = self.parts.memory.shared.hosts_address();
        // SAFETY: both tables have `layers * rows` addresses; steps are queued on the same stream.
        unsafe { stream.copy(sparse.hosts.address(), from, layers * rows * 8)? };
        for sets in &sparse.layers {
            let at = sets.slot_block.address().offset(row * kv_heads * slots * 4);
            // SAFETY: the row's own slots; no step that uses them is queued after the one before.
            unsafe { stream.fill(at, 0xff, kv_heads * slots * 4)? };
            let tiles = kv_heads * self.parts.extent.tiles * self.parts.tile_bytes();
            if self.parts.store_link.is_some() && tiles > 0 {
                // Whole tiles are handed over: nothing of another request must be in them.
                // SAFETY: as above, the row's own tiles.
                unsafe { stream.fill(self.parts.summaries(sets, row * kv_heads), 0, tiles)? };
            }
        }
        Ok(())
    }

    /// Sets memory aside for a request; its prompt is read here, or expected from another executor.
    pub(super) fn set_aside(&mut self, sequence: Sequence, is_expected: bool) -> anyhow::Result<Admission> {
        let id = sequence.request;
        anyhow::ensure!(!self.requests.contains_key(&id), "request {id} is admitted already");
        anyhow::ensure!(!sequence.prompt.is_empty(), "request {id}: expected at least one prompt token, found none");
        Ok(self.try_admit(sequence, is_expected)?)
    }

    /// A request leaves its row; what memory of the host or a store has of it stays.
    pub(super) fn vacate(&mut self, id: RequestId, request: &Request) {
        self.rows[request.row] = None;
        if let Some(side) = &self.parts.host_side {
            side.borrow_mut().rows.release(request.row);
        }
        self.staged = self.staged.filter(|staged| *staged != id);
        self.parts.memory.shared.set_sampling(request.row, SamplingParams::default());
        self.device_bytes -= request.footprint;
    }

    fn try_admit(&mut self, sequence: Sequence, is_expected: bool) -> Result<Admission, DeviceError> {
        let Sequence { request: id, prompt, max_new_tokens, sampling } = sequence;
        if let Some(reason) = sampler::refusal(sampling, self.info.vocab) {
            return Ok(Admission::Refused { reason });
        }
        if let Some(token) = prompt.iter().find(|token| token.index() >= self.info.vocab) {
            let reason = format!("expected prompt tokens below {}, found {token}", self.info.vocab);
            return Ok(Admission::Refused { reason });
        }
        // The last generated token is never run.
        let tokens = prompt.len() + max_new_tokens.saturating_sub(1);
        if tokens > self.info.max_context {
            let reason = format!(
                "expected a context of at most {} tokens, found {tokens} (device.max_context)",
                self.info.max_context
            );
            return Ok(Admission::Refused { reason });
        }
        let Some(row) = self.rows.iter().position(Option::is_none) else {
            return Ok(Admission::Wait { reason: format!("device memory: all {} rows are in use", self.rows.len()) });
        };
        let blocks = self.info.geometry.full_blocks(tokens);
        let bytes = (self.info.geometry.layers * blocks * self.info.geometry.block_bytes()) as u64;
        let reservation = match (&self.parts.store_link, &mut self.parts.host) {
            (Some(link), _) => Some(link.borrow_mut().reserve(id, row, blocks)),
            (None, Some(host)) => Some(host.reserve(id, bytes)),
            (None, None) => None,
        };
        if let Some(reservation) = reservation {
            match reservation {
                Reservation::Granted => {}
                Reservation::Full { needed, free } => {
                    return Ok(Admission::Wait {
                        reason: format!("host KV memory: {needed} bytes needed, {free} free"),
                    });
                }
                Reservation::TooLarge { needed, capacity } => {
                    return Ok(Admission::Refused {
                        reason: format!(
                            "the KV store is too small: expected room for {needed} bytes, found {capacity}\n  hint: raise \
                             store.capacity, or shorten the context"
                        ),
                    });
                }
            }
        }
        self.prepare_row(id, row, blocks)?;
        self.parts.memory.shared.set_sampling(row, sampling);
        let footprint = self.footprint(tokens.div_ceil(BLOCK_TOKENS), if is_expected { 0 } else { prompt.len() });
        self.device_bytes += footprint;
        if self.device_bytes.total() > self.device_peak.total() {
            self.device_peak = self.device_bytes;
        }
        self.rows[row] = Some(id);
        let request = Request {
            row,
            prompt: prompt.len(),
            blocks,
            position: prompt.len(),
            end: tokens,
            footprint,
            phase: if is_expected { Phase::Expected } else { Phase::Prefill { prompt, queued: 0 } },
        };
        self.requests.insert(id, request);
        Ok(Admission::Admitted)
    }
}
