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

use super::layer::HeadShape;
use super::memory::{ScheduleArrays, SparseMemory};
use super::options::Residency;
use super::parts::Parts;
use super::sampling::Choice;
use super::scope::{HostLayers, Scope};
use super::stages::Stages;
use crate::device::DeviceError;
use crate::gemm::Output;
use crate::kernels::{Address, EmbedParams, ScheduleParams, StepInput, TapsParams};
use oasis_core::pipeline::Track;
use oasis_core::policy::QuerySource;

impl Parts {
    /// Queues a whole step.
    pub fn queue_step(&self, scope: Scope) -> Result<(), DeviceError> {
        if let Some(link) = &self.link_follower {
            link.borrow().queue_cap(&self.streams.foreground)?;
        }
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
            if let (Scope::First(first), Some(sparse)) = (scope, &self.memory.sparse)
                && let Some(from) = first.fetch
            {
                // As far ahead as there is room: what a layer's place held has been read by then.
                self.order(&self.streams.foreground, &self.streams.offload)?;
                let by_now = sparse.staging.places.fetched_by(layer, first.kept);
                (fetched.max(first.kept)..by_now).try_for_each(|next| self.queue_fetch(sparse, from, next))?;
                fetched = by_now;
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
    fn queue_fetch(&self, sparse: &SparseMemory, from: HostLayers, layer: usize) -> Result<(), DeviceError> {
        let (to, from_layer) = (sparse.staging.layer(layer), from.address.offset(layer * from.stride));
        self.fetch_layer(from, layer, to)?;
        for (at, bytes) in self.host_parts(from_layer, from.bytes) {
            // SAFETY: the entries are reserved for the request; its place was waited for.
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
