//! One decode step: the foreground on its stream, the background stages on theirs.
//!
//! Streams and what they wait for, per layer `l`:
//!
//! - foreground: norm, QKV, append(l), attention(l) once the layer's transfer of the step before is done, output, MLP;
//! - predict: scan(l) and selection(l) after attention(l), which reads slots before they change. One fork a layer: more of
//!   them would cost a small batch more than an earlier scan gains;
//! - transfer: gather(l) after selection(l) for the first layers; those of the others are left to the start of the next
//!   step, so that no step ends with a transfer that nothing hides.
//!
//! Where a layer ranks by the query that is about to attend, its stages run in front of its attention on the foreground's
//! stream; see `correct` for those that do only where a query has turned away, and `ahead` for those that run beside the
//! layer before.

use super::memory::{Activations, LayerSets, ScheduleArrays, SparseMemory};
use super::options::Residency;
use super::parts::{Parts, Work};
use super::programs::{LayerPrograms, SparsePrograms};
use super::sampling::Choice;
use crate::device::{DeviceError, Stream};
use crate::gemm::Output;
use crate::kernels::{
    ActivationParams, AddNormParams, Address, AppendParams, AttentionParams, EmbedParams, GatherParams,
    HashScoresParams, ScanParams, ScheduleParams, SelectParams, StepInput, TapsParams,
};
use crate::layout::{BLOCK_TOKENS, entry_bytes, tile_bytes};
use crate::model::{DeviceAttention, DeviceMlp, DeviceVector};
use oasis_core::ids::LayerId;
use oasis_core::pipeline::Track;
use oasis_core::policy::QuerySource;

/// Which rows a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// The first `n` rows, each over its working set (or over its pages in dense decoding).
    Batch(usize),
    /// The first decode step of one row, which sees its full KV and chooses its first working set.
    First(FirstStep),
}

/// A request's first decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FirstStep {
    pub row: usize,
    /// Where its full KV must be fetched from; `None` where the prefill left it on the device.
    pub fetch: Option<HostLayers>,
}

/// A request's KV in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostLayers {
    /// `[layers][reserved blocks][kv_heads]` entries.
    pub address: Address,
    /// Bytes from a layer to the next.
    pub stride: usize,
    /// Bytes of the complete blocks of a layer.
    pub bytes: usize,
}

impl Scope {
    pub fn first_row(self) -> usize {
        match self {
            Self::Batch(_) => 0,
            Self::First(first) => first.row,
        }
    }

    pub fn requests(self) -> usize {
        match self {
            Self::Batch(requests) => requests,
            Self::First(_) => 1,
        }
    }

    pub fn is_first(self) -> bool {
        matches!(self, Self::First(_))
    }
}

/// An attention layer's shape, the target's or the head's.
pub(super) struct HeadShape {
    pub q_heads: usize,
    pub kv_heads: usize,
}

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

/// Which blocks of which rows are ranked.
#[derive(Clone, Copy)]
pub(super) struct RankedRows {
    /// i32 `[rows]`: position of the newest token; -1 where there is nothing to rank.
    pub newest: Address,
    /// i32 `[rows]`: complete blocks.
    pub blocks: Address,
    /// i32 `[rows + 1]`: summary tiles of a KV head before each row.
    pub tile_start: Address,
}

/// Where an attention layer keeps its KV.
pub(super) struct KvPlace {
    /// Tails, or pages.
    pub append_to: Address,
    pub pages: Address,
    pub summaries: Address,
    pub entries: Address,
    pub tail: Address,
    pub slots: usize,
}

impl Parts {
    /// Queues a whole step.
    pub fn queue_step(&self, scope: Scope) -> Result<(), DeviceError> {
        self.queue_link_cap(&self.streams.foreground)?;
        self.queue_schedule(scope)?;
        let rotation = self.rotation();
        if let (Scope::Batch(_), Some((sparse, programs))) = (scope, self.sparse())
            && rotation < self.layers()
        {
            self.order(&self.streams.foreground, &self.streams.transfer)?;
            match &self.store_link {
                Some(_) => self.begin_transfers(sparse)?,
                None => {
                    for layer in rotation..self.layers() {
                        self.gather(programs, layer, &self.streams.transfer, self.stamps(layer))?;
                        self.streams.transfer.record(&self.events.transferred[layer])?;
                    }
                }
            }
        }
        if self.memory.draft.is_some() {
            self.span(&self.streams.foreground, Track::Foreground, "draft head", 0, || self.queue_draft(scope))?;
        }
        self.queue_embedding(scope)?;
        let mut fetched = 0;
        for layer in 0..self.layers() {
            if let Scope::First(FirstStep { fetch: Some(from), .. }) = scope {
                // As far ahead as there is room: what a layer's place held has been read by then.
                self.order(&self.streams.foreground, &self.streams.offload)?;
                while fetched < self.layers().min(layer + self.plan.prefill_layers) {
                    self.queue_fetch(from, fetched)?;
                    fetched += 1;
                }
                self.streams.foreground.wait(&self.events.copied[layer])?;
            }
            self.queue_layer(scope, layer)?;
        }
        let last = self.layers() - 1;
        self.span(&self.streams.foreground, Track::Foreground, "output", last, || self.queue_output(scope))?;
        if !scope.is_first() && self.runs_beside() {
            for stream in [&self.streams.predict, &self.streams.transfer] {
                self.order(stream, &self.streams.foreground)?;
            }
        }
        Ok(())
    }

    /// The first layer whose transfer is left to the next step; all layers' are not where selection is waited for.
    pub fn rotation(&self) -> usize {
        match self.source() {
            Some(QuerySource::Exact | QuerySource::PreviousLayer) | None => self.layers(),
            // What admissions name is known when the step is through.
            _ if self.store_link.is_some() => 0,
            _ => self.layers() / 2,
        }
    }

    /// Whether the stages run beside the foreground.
    pub fn runs_beside(&self) -> bool {
        matches!(self.source(), Some(QuerySource::Draft | QuerySource::Current))
    }

    /// Carries out the transfers that the last step left to the next one.
    pub fn queue_left_transfers(&self) -> Result<(), DeviceError> {
        let Some((sparse, programs)) = self.sparse() else { return Ok(()) };
        if self.store_link.is_some() {
            self.begin_transfers(sparse)?;
            let stream = &self.streams.foreground;
            return (0..self.layers()).try_for_each(|layer| self.complete_transfer(sparse, programs, layer, stream));
        }
        let stream = &self.streams.foreground;
        (self.rotation()..self.layers()).try_for_each(|layer| self.gather(programs, layer, stream, self.stamps(layer)))
    }

    /// Brings a layer's full KV back from the host.
    fn queue_fetch(&self, from: HostLayers, layer: usize) -> Result<(), DeviceError> {
        let Some(sparse) = &self.memory.sparse else { return Ok(()) };
        let (to, from_layer) = (self.staging(sparse, layer), from.address.offset(layer * from.stride));
        self.fetch_layer(from, layer, to)?;
        for (at, bytes) in self.host_parts(from_layer, from.bytes) {
            // SAFETY: the entries are reserved for the request; the place in `staging` was waited for.
            unsafe { self.streams.offload.copy(to.offset(at), from_layer.offset(at), bytes)? };
        }
        self.streams.offload.record(&self.events.copied[layer])
    }

    /// Whether a step chooses before it appends: blocks that it completes are ranked by the next one.
    pub fn chooses_first(&self) -> bool {
        matches!(self.source(), Some(QuerySource::Exact | QuerySource::PreviousLayer))
    }

    /// Whether the host carries entries, and waits for the list of those.
    pub fn host_carries(&self) -> bool {
        self.store_link.is_some() || self.list_landing.is_some()
    }

    fn source(&self) -> Option<QuerySource> {
        match &self.options.residency {
            Residency::Dense => None,
            Residency::Sparse(sparse) => Some(sparse.source),
        }
    }

    pub fn schedule(&self, scope: Scope) -> &ScheduleArrays {
        match (scope, &self.memory.sparse) {
            (Scope::First(_), Some(sparse)) => &sparse.first,
            _ => &self.memory.schedule,
        }
    }

    fn queue_schedule(&self, scope: Scope) -> Result<(), DeviceError> {
        let arrays = self.schedule(scope);
        let first = scope.is_first();
        let shared = &self.memory.shared;
        let params = ScheduleParams {
            inputs: if first { shared.first_address() } else { shared.inputs_address() },
            token: arrays.token(),
            position: arrays.position(),
            ranked: arrays.ranked(),
            entry_start: arrays.entry_start(),
            tile_start: arrays.tile_start(),
            blocks: arrays.blocks(),
            draft_position: arrays.draft_position(),
            draft_entry_start: arrays.draft_entry_start(),
            step: self.memory.step.address(),
            requests: scope.requests() as i32,
            slots: if first { self.extent.blocks } else { self.extent.slots } as i32,
            draft_blocks: self.extent.draft_blocks as i32,
            lag: i32::from(self.chooses_first()),
        };
        // SAFETY: the arrays have room for all rows; inputs are mapped and written before the step is launched.
        unsafe { self.programs.schedule.launch(&self.streams.foreground, (1, 1), &params) }
    }

    fn queue_embedding(&self, scope: Scope) -> Result<(), DeviceError> {
        let (schedule, model) = (self.schedule(scope), &self.model);
        let draft = self.memory.draft.as_ref();
        let params = EmbedParams {
            table: model.embed.address(),
            tokens: schedule.token(),
            draft_tokens: draft.map_or(Address::NONE, |draft| draft.tokens.address()),
            target_ids: self.target_ids(),
            out: self.memory.activations.residual.address(),
            hidden: model.spec.hidden as i32,
        };
        let rows = scope.requests() * self.extent.queries;
        // SAFETY: tokens are checked against the vocabulary before a step; the residual has room for all rows.
        unsafe { self.programs.embed.launch(&self.streams.foreground, (rows as u32, 1), &params) }
    }

    fn target_ids(&self) -> Address {
        let ids = self.model.head.as_ref().and_then(|head| head.target_ids.as_ref());
        ids.map_or(Address::NONE, |ids| ids.address())
    }

    fn queue_layer(&self, scope: Scope, index: usize) -> Result<(), DeviceError> {
        let (layer, spec) = (&self.model.layers[index], &self.model.spec);
        let (work, activations) = (self.foreground(), &self.memory.activations);
        let rows = scope.requests() * self.extent.queries;
        let shape = HeadShape { q_heads: spec.q_heads, kv_heads: spec.kv_heads };
        let programs = &self.programs.layer;
        // The MLP of the layer before is added here.
        let added = if index == 0 { Address::NONE } else { activations.added.address() };
        let foreground = |name, operation: &dyn Fn() -> Result<(), DeviceError>| {
            self.span(work.stream, Track::Foreground, name, index, operation)
        };
        foreground("norm", &|| self.norm(&work, programs, activations, rows, added, &layer.input_norm, spec.norm_eps))?;
        self.keep_taps(scope, index)?;
        let place = self.kv_place(scope, index);
        foreground("qkv", &|| self.project(&work, rows, activations, &layer.attention))?;
        let positions = (self.schedule(scope).position(), self.model.rotation.address());
        let (requests, q, eps) = (scope.requests(), self.query_buffer(index), spec.norm_eps);
        foreground("append", &|| {
            self.append(&work, programs, &shape, &layer.attention, activations, requests, positions, &place, q, eps)
        })?;
        self.choose_ahead(scope, index)?;
        let attend = || foreground("attention", &|| self.attend(&work, scope, &shape, &place, q));
        match self.sparse() {
            None => attend()?,
            Some((sparse, programs)) => {
                let stages = self.stages(scope, sparse, programs, index);
                match (scope.is_first(), self.source()) {
                    // Nothing to hide behind.
                    (true, _) => {
                        self.keep_queries(stages, work.stream)?;
                        self.scan(stages, work.stream)?;
                        attend()?;
                        self.select(stages, work.stream)?;
                        // What fills a first working set does not cross the link.
                        self.gather(programs, index, work.stream, Address::NONE)?;
                    }
                    (false, Some(QuerySource::PreviousLayer)) if index > 0 => {
                        self.wait_for_choice(sparse, programs, index)?;
                        attend()?;
                    }
                    (false, Some(QuerySource::Exact | QuerySource::PreviousLayer)) => {
                        self.scan(stages, work.stream)?;
                        self.select(stages, work.stream)?;
                        self.transfer_at_once(sparse, programs, index, work.stream)?;
                        attend()?;
                    }
                    (false, _) => self.attend_beside_stages(stages, &attend)?,
                }
            }
        }
        let added = activations.added.address();
        foreground("output projection", &|| {
            let (attended, rows) = (activations.attended.address(), (rows, activations.rows));
            self.linear(&work, rows, &layer.attention.o, attended, added, Output::Bf16)
        })?;
        foreground("norm", &|| {
            self.norm(&work, programs, activations, rows, added, &layer.post_attention_norm, spec.norm_eps)
        })?;
        foreground("mlp", &|| self.feed_forward(&work, activations, (rows, index), positions.0))
    }

    /// Attention on the foreground's stream, prediction, selection and transfer on theirs.
    fn attend_beside_stages(
        &self,
        stages: Stages<'_>,
        attend: &dyn Fn() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let (streams, layer) = (&self.streams, stages.layer);
        if layer >= self.rotation() {
            if self.store_link.is_some() {
                self.complete_transfer(stages.sparse, stages.programs, layer, &streams.transfer)?;
                streams.transfer.record(&self.events.transferred[layer])?;
            }
            streams.foreground.wait(&self.events.transferred[layer])?;
        }
        self.correct(stages, &streams.foreground)?;
        attend()?;
        self.order(&streams.foreground, &streams.predict)?;
        self.scan(stages, &streams.predict)?;
        self.select(stages, &streams.predict)?;
        if layer < self.rotation() {
            self.order(&streams.predict, &streams.transfer)?;
            self.gather(stages.programs, layer, &streams.transfer, self.stamps(layer))?;
        }
        Ok(())
    }

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

    /// Queries of a layer: each has its own, which its scan may still read while the next layer's are written.
    pub fn query_buffer(&self, layer: usize) -> Address {
        let activations = &self.memory.activations;
        activations.q.address().offset(layer * activations.attended.bytes())
    }

    pub fn mlp(
        &self,
        work: &Work<'_>,
        activations: &Activations,
        rows: usize,
        mlp: &DeviceMlp,
    ) -> Result<(), DeviceError> {
        let (normed, room) = (activations.normed.address(), activations.rows);
        let (gate_up, inner) = (activations.gate_up.address(), activations.inner.address());
        self.linear(work, (rows, room), &mlp.gate_up, normed, gate_up, Output::Bf16)?;
        self.swiglu(work, rows, mlp.down.cols, gate_up, inner)?;
        self.linear(work, (rows, room), &mlp.down, inner, activations.added.address(), Output::Bf16)
    }

    /// Queues SwiGLU of `rows` rows.
    pub fn swiglu(
        &self,
        work: &Work<'_>,
        rows: usize,
        width: usize,
        gate_up: Address,
        out: Address,
    ) -> Result<(), DeviceError> {
        let params = ActivationParams { gate_up, out, rows: rows as i32, width: width as i32 };
        let ctas = crate::kernels::Activation.ctas(rows, width);
        // SAFETY: both activations have room for `rows` rows of that width.
        unsafe { self.programs.activation.launch(work.stream, (ctas, 1), &params) }
    }

    /// Adds `added` to the residual, where there is any, and writes its norm.
    #[allow(clippy::too_many_arguments)]
    pub fn norm(
        &self,
        work: &Work<'_>,
        programs: &LayerPrograms,
        activations: &Activations,
        rows: usize,
        added: Address,
        weight: &DeviceVector,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let hidden = weight.len() as i32;
        let params = AddNormParams {
            residual: activations.residual.address(),
            x: added,
            weight: weight.address(),
            out: activations.normed.address(),
            hidden,
            out_stride: hidden,
            eps,
        };
        // SAFETY: the activations have room for `rows` rows.
        unsafe { programs.norm.launch(work.stream, (rows as u32, 1), &params) }
    }

    fn keep_taps(&self, scope: Scope, layer: usize) -> Result<(), DeviceError> {
        let (Some(head), Some(draft)) = (&self.model.head, &self.memory.draft) else { return Ok(()) };
        let hidden = self.model.spec.hidden;
        for (tap, _) in head.taps.iter().enumerate().filter(|(_, tapped)| **tapped == layer) {
            let row = scope.first_row() * 3 * hidden * 2;
            let params = TapsParams {
                residual: self.memory.activations.residual.address(),
                position: self.schedule(scope).position(),
                taps: draft.taps.address().offset(row + tap * hidden * 2),
                hidden: hidden as i32,
            };
            // SAFETY: taps have room for all rows of the scope.
            unsafe {
                self.programs.taps.launch(&self.streams.foreground, (scope.requests() as u32, 1), &params)?;
            }
        }
        Ok(())
    }

    fn kv_place(&self, scope: Scope, layer: usize) -> KvPlace {
        let spec = &self.model.spec;
        let row = scope.first_row();
        let entry = entry_bytes(spec.head_dim);
        match &self.memory.sparse {
            None => {
                let pages = self.page_row(row);
                let entries = self.memory.dense[layer].address();
                let slots = self.extent.blocks;
                KvPlace { append_to: entries, pages, summaries: Address::NONE, entries, tail: Address::NONE, slots }
            }
            Some(sparse) => {
                let sets = &sparse.layers[layer];
                let pair = row * spec.kv_heads;
                let tail = sets.tail.address().offset(pair * 2 * entry);
                let summaries = self.summaries(sets, pair);
                match scope {
                    Scope::Batch(_) => KvPlace {
                        append_to: tail,
                        pages: Address::NONE,
                        summaries,
                        entries: sets.slots.address(),
                        tail,
                        slots: self.extent.slots,
                    },
                    Scope::First(_) => KvPlace {
                        append_to: tail,
                        pages: Address::NONE,
                        summaries,
                        entries: self.staging(sparse, layer),
                        tail,
                        slots: self.extent.blocks,
                    },
                }
            }
        }
    }

    /// Where the full KV of a layer lies on the device.
    pub fn staging(&self, sparse: &SparseMemory, layer: usize) -> Address {
        sparse.staging.address().offset(layer % self.plan.prefill_layers * sparse.layer_bytes)
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

    /// Pages of a row.
    pub fn page_row(&self, row: usize) -> Address {
        self.memory.page_table.address().offset(row * self.extent.blocks * 4)
    }

    /// QKV product of normalised rows.
    pub fn project(
        &self,
        work: &Work<'_>,
        rows: usize,
        activations: &Activations,
        attention: &DeviceAttention,
    ) -> Result<(), DeviceError> {
        let (x, y) = (activations.normed.address(), activations.qkv.address());
        self.linear_with_bias(work, (rows, activations.rows), &attention.qkv, attention.qkv_bias.as_ref(), x, y)
    }

    /// Norms and rotation of queries and keys; keys and values go to their block.
    #[allow(clippy::too_many_arguments)]
    pub fn append(
        &self,
        work: &Work<'_>,
        programs: &LayerPrograms,
        shape: &HeadShape,
        attention: &DeviceAttention,
        activations: &Activations,
        requests: usize,
        (position, rotation): (Address, Address),
        place: &KvPlace,
        q: Address,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let vector = |vector: &Option<DeviceVector>| vector.as_ref().map_or(Address::NONE, |v| v.address());
        let params = AppendParams {
            qkv: activations.qkv.address(),
            q_norm: vector(&attention.q_norm),
            k_norm: vector(&attention.k_norm),
            rotation,
            position,
            q,
            tail: place.append_to,
            pages: place.pages,
            summaries: place.summaries,
            requests: requests as i32,
            q_heads: shape.q_heads as i32,
            kv_heads: shape.kv_heads as i32,
            max_tiles: self.extent.tiles as i32,
            page_stride: self.extent.blocks as i32,
            eps,
        };
        let ctas = programs.append_shape.ctas(requests, shape.q_heads, shape.kv_heads);
        // SAFETY: positions lie below the longest context, for which tables, tails, pages and summaries are sized.
        unsafe { programs.append.launch(work.stream, (ctas, 1), &params) }
    }

    fn attend(
        &self,
        work: &Work<'_>,
        scope: Scope,
        shape: &HeadShape,
        place: &KvPlace,
        q: Address,
    ) -> Result<(), DeviceError> {
        let (schedule, activations) = (self.schedule(scope), &self.memory.activations);
        let programs = &self.programs.layer;
        let first = scope.is_first();
        let kernel = match (&self.programs.sparse, first) {
            (Some(sparse), true) => &sparse.full,
            _ => &programs.attention,
        };
        let pages = match &self.memory.sparse {
            Some(sparse) if first => sparse.identity.address(),
            _ => place.pages,
        };
        let params = AttentionParams {
            q,
            entries: place.entries,
            pages,
            tail: place.tail,
            start: schedule.entry_start(),
            position: schedule.position(),
            out: activations.attended.address(),
            partial: activations.partial.address(),
            arrived: activations.arrived.address(),
            requests: scope.requests() as i32,
            kv_heads: shape.kv_heads as i32,
            slots: place.slots as i32,
            scale: programs.attention_shape.scale(),
        };
        // SAFETY: slots, tails and pages hold what the schedule says; partial sums are sized for the grid.
        unsafe { kernel.launch(work.stream, (self.attention_ctas(scope), 1), &params) }
    }

    /// CTAs of attention and of the scan: beside a gather, some multiprocessors are left to it.
    fn attention_ctas(&self, scope: Scope) -> u32 {
        let multiprocessors = self.device.facts.multiprocessors;
        match (&self.options.residency, scope) {
            // Beside so little work more CTAs cost more in putting parts together than they save.
            (Residency::Sparse(_), Scope::Batch(1)) => multiprocessors / 2,
            (Residency::Sparse(sparse), Scope::Batch(_)) => {
                multiprocessors - sparse.gather.ctas.min(multiprocessors / 2)
            }
            _ => 2 * multiprocessors,
        }
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
        // SAFETY: summaries and scores are sized for all rows and the longest context.
        self.span(stream, Track::Predict, "scan", layer, || unsafe {
            kernel.launch(stream, (self.attention_ctas(scope), 1), &params)
        })
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
            Scope::First(_) => sparse.staged.address().offset(layer * 8),
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

    /// Final norm, output projection and choice of the next tokens.
    fn queue_output(&self, scope: Scope) -> Result<(), DeviceError> {
        let (work, activations, spec) = (self.foreground(), &self.memory.activations, &self.model.spec);
        let (requests, queries) = (scope.requests(), self.extent.queries);
        let programs = &self.programs.layer;
        let added = activations.added.address();
        self.norm(&work, programs, activations, requests * queries, added, &self.model.norm, spec.norm_eps)?;
        // Draft rows have no use for logits: their rows are passed over.
        let (x, y) = (activations.normed.address(), activations.logits.address());
        let room = activations.rows / queries;
        self.linear_strided(&work, (requests, room), self.model.output(), x, y, queries * spec.hidden)?;
        let row = scope.first_row();
        let choice = Choice {
            memory: &activations.sampler,
            rows: requests,
            first: Some(row),
            logits: y,
            vocab: spec.vocab,
            position: self.schedule(scope).position(),
            token: self.memory.shared.outputs_address().offset(row * 4),
        };
        self.choose(&work, &choice)
    }
}

/// Inputs of a batch in which nothing runs.
pub(super) const PADDING: StepInput = StepInput { token: 0, position: -1 };
