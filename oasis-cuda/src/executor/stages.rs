//! The background stages of a layer: scan, selection, gather.

use super::choices::RankedRows;
use super::memory::{LayerSets, SparseMemory};
use super::options::Residency;
use super::parts::Parts;
use super::programs::SparsePrograms;
use super::scope::Scope;
use crate::device::{DeviceError, Stream};
use crate::kernels::{Address, GatherParams, HashScoresParams, Scan, ScanParams, SelectParams};
use crate::layout::{BLOCK_TOKENS, entry_bytes, tile_bytes};
use oasis_core::ids::LayerId;
use oasis_core::pipeline::Track;

/// What the background stages of a layer work on.
#[derive(Clone, Copy)]
pub(super) struct Stages<'a> {
    pub scope: Scope,
    pub sparse: &'a SparseMemory,
    pub programs: &'a SparsePrograms,
    pub layer: usize,
    /// bf16 `[rows][queries][q_heads][head_dim]`, one of which blocks are ranked by.
    pub query: Address,
    pub rows: RankedRows,
}

impl Parts {
    /// The stages of a layer that ranks by its own query.
    pub fn stages<'a>(
        &self,
        scope: Scope,
        sparse: &'a SparseMemory,
        programs: &'a SparsePrograms,
        layer: usize,
    ) -> Stages<'a> {
        let schedule = self.schedule(scope);
        let rows =
            RankedRows { newest: schedule.ranked(), blocks: schedule.blocks(), tile_start: schedule.tile_start() };
        Stages { scope, sparse, programs, layer, query: self.query_buffer(layer), rows }
    }

    pub fn scan(&self, stages: Stages<'_>, stream: &Stream) -> Result<(), DeviceError> {
        let Stages { scope, sparse, programs, layer, query, rows } = stages;
        let (spec, sets) = (&self.model.spec, &sparse.layers[layer]);
        let pair = scope.first_row() * spec.kv_heads;
        let tiles = self.extent.tiles;
        let params = ScanParams {
            q: query,
            summaries: sets.summaries.address().offset(pair * tiles * self.tile_bytes()),
            start: rows.tile_start,
            blocks: rows.blocks,
            scores: sets.scores.address().offset(pair * tiles * BLOCK_TOKENS * 4),
            requests: scope.requests() as i32,
            kv_heads: spec.kv_heads as i32,
            max_tiles: tiles as i32,
        };
        if programs.hash.is_some() {
            return self.hash_scores(stages, &params, stream);
        }
        // Where there is no scan, the host ranks, or no score is asked for.
        let Some(kernel) = &programs.scan else { return Ok(()) };
        let ctas = match scope {
            Scope::Batch(2..) => {
                self.attention_ctas(scope) * Scan::ctas_per_multiprocessor(self.tile_bytes() / BLOCK_TOKENS)
            }
            _ => self.attention_ctas(scope),
        };
        // SAFETY: summaries and scores are sized for all rows and the longest context.
        self.span(stream, Track::Predict, "scan", layer, || unsafe { kernel.launch(stream, (ctas, 1), &params) })
    }

    /// Scores that are a hash, in place of a scan.
    fn hash_scores(&self, stages: Stages<'_>, scan: &ScanParams, stream: &Stream) -> Result<(), DeviceError> {
        let Residency::Sparse(options) = &self.options.residency else { return Ok(()) };
        let (Some(kernel), Some(seed)) = (&stages.programs.hash, options.hash()) else { return Ok(()) };
        let params = HashScoresParams {
            q: scan.q,
            blocks: scan.blocks,
            scores: scan.scores,
            seed: seed.of_layer(LayerId::from(stages.layer)),
            kv_heads: scan.kv_heads,
            stride: scan.max_tiles * BLOCK_TOKENS as i32,
        };
        // SAFETY: scores are sized for all rows and the longest context.
        self.span(stream, Track::Predict, "scan", stages.layer, || unsafe {
            kernel.launch(stream, (scan.kv_heads as u32, scan.requests as u32), &params)
        })
    }

    pub fn select(&self, stages: Stages<'_>, stream: &Stream) -> Result<(), DeviceError> {
        let Stages { scope, sparse, programs, layer, rows, .. } = stages;
        let Residency::Sparse(options) = &self.options.residency else { return Ok(()) };
        let Some(kernel) = &programs.select else { return self.select_on_host(scope, sparse, layer, stream) };
        let (spec, sets) = (&self.model.spec, &sparse.layers[layer]);
        let pair = scope.first_row() * spec.kv_heads;
        let (slots, entry) = (self.extent.slots, entry_bytes(spec.head_dim));
        let kept = options.ranking.map(|ranking| ranking.kept).unwrap_or_default();
        let stride = self.extent.tiles * BLOCK_TOKENS;
        let host = match scope {
            Scope::Batch(_) => sparse.hosts.address().offset(layer * self.memory.rows * 8),
            Scope::First(_) => sparse.staging.address_of(layer),
        };
        let params = SelectParams {
            scores: sets.scores.address().offset(pair * stride * 4),
            position: rows.newest,
            slot_block: sets.slot_block.address().offset(pair * slots * 4),
            last_selected: sets.last_selected.address().offset(pair * slots * 4),
            times_selected: sets.times_selected.address().offset(pair * slots * 4),
            host,
            entries: sets.slots.address().offset(pair * slots * entry),
            tail: sets.tail.address().offset(pair * 2 * entry),
            list: sparse.list(layer),
            copies: sets.copies.address(),
            step: self.memory.step.address(),
            kv_heads: spec.kv_heads as i32,
            stride: stride as i32,
            slots: slots as i32,
            cap: options.cap as i32,
            sinks: kept.sinks.min(slots) as i32,
            recent: kept.recent.min(slots) as i32,
            link_cap: self.link_follower.as_ref().map_or(Address::NONE, |link| link.borrow().link_cap()),
            stamps: if scope.is_first() { Address::NONE } else { self.stamps(layer) },
        };
        // SAFETY: tables are sized for all rows; the list has room for every slot and two copies a head.
        self.span(stream, Track::Select, "select", layer, || unsafe {
            kernel.launch(stream, (spec.kv_heads as u32, scope.requests() as u32), &params)
        })
    }

    /// CTAs of the gather; `None` in dense decoding.
    pub fn gather_ctas(&self) -> Option<u32> {
        match &self.options.residency {
            Residency::Dense => None,
            Residency::Sparse(sparse) => Some(sparse.gather.ctas),
        }
    }

    /// Carries out a layer's list of copies on `stream`, from wherever the full KV lies.
    pub fn transfer_at_once(
        &self,
        sparse: &SparseMemory,
        programs: &SparsePrograms,
        layer: usize,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        match &self.store_link {
            Some(_) => self.transfer_now(sparse, programs, layer, stream),
            None => self.gather(programs, layer, stream, self.stamps(layer)),
        }
    }

    /// Carries out a layer's list of copies; `stamps` is where it writes down how long it takes, if anywhere.
    pub fn gather(
        &self,
        programs: &SparsePrograms,
        layer: usize,
        stream: &Stream,
        stamps: Address,
    ) -> Result<(), DeviceError> {
        let (Residency::Sparse(options), Some(sparse)) = (&self.options.residency, &self.memory.sparse) else {
            return Ok(());
        };
        let timer = self.host_side.as_ref().map(|side| side.borrow());
        if let Some(side) = &timer {
            side.link.begin(layer, stream)?;
        }
        if options.copy_engine {
            self.copy_entries(sparse, layer, stream)?;
        } else {
            let (list, copies) = (sparse.list(layer), sparse.layers[layer].copies.address());
            let params = GatherParams { list, copies, stamps };
            // SAFETY: the list was written by a selection: its sources are entries of reserved host memory or tails.
            self.span(stream, Track::Transfer, "gather", layer, || unsafe {
                programs.gather.launch(stream, (options.gather.ctas, 1), &params)
            })?;
        }
        timer.map_or(Ok(()), |side| side.link.end(layer, stream))
    }

    /// Summaries of a layer from the `pair`-th row and KV head on; none where the host summarises.
    pub fn summaries(&self, sets: &LayerSets, pair: usize) -> Address {
        match self.tile_bytes() {
            0 => Address::NONE,
            tile => sets.summaries.address().offset(pair * self.extent.tiles * tile),
        }
    }

    /// Bytes of a summary tile.
    pub fn tile_bytes(&self) -> usize {
        match &self.options.residency {
            Residency::Dense => 0,
            Residency::Sparse(sparse) => tile_bytes(sparse.device_summary()),
        }
    }
}
