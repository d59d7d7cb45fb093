//! One decode step of a batch: the foreground, with the background stages handed their tasks on the way.

use crate::cpu::attention::{AttentionView, attend};
use crate::cpu::decoder::embed;
use crate::cpu::eagle3::DraftRow;
use crate::cpu::executor::{CpuExecutor, Sparse};
use crate::cpu::linear::Regime;
use crate::cpu::request::Request;
use crate::cpu::rotation::Rotation;
use oasis_core::executor::{DecodeRow, RequestError};
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, Step, TokenId};
use oasis_core::memory::{EntryKey, FetchedEntries, LayerCache, Resident};
use oasis_core::observer::{LayerView, SelectionMember, SelectionView};
use oasis_core::pipeline::{LayerDone, PredictMember, PredictTask, SelectTask, Track};
use oasis_core::policy::QuerySource;
use oasis_core::working_set::Admission;
use std::ops::Range;
use std::time::Instant;

/// One request in the step.
pub(super) struct Member {
    id: RequestId,
    request: Request,
    token: TokenId,
    /// Its rows: the normal token, the draft token where there is one, then probes.
    rows: Range<usize>,
    has_draft: bool,
    error: Option<RequestError>,
}

impl Member {
    /// Whether this step must see the full KV, since no working set has been chosen yet.
    fn sees_full_kv(&self, layer: usize) -> bool {
        self.request.steps == 0
            && self.request.layers[layer]
                .as_ref()
                .is_some_and(|cache| cache.resident.tail.block().index() > cache.resident.set.slots())
    }

    /// Slots and tail, whether or not the summaries are with the stages already.
    fn resident(&self, layer: usize) -> &Resident {
        match &self.request.attending {
            Some(resident) => resident,
            None => &self.cache(layer).resident,
        }
    }

    fn cache(&self, layer: usize) -> &LayerCache {
        self.request.layers[layer].as_ref().expect("the layer was waited for")
    }

    fn fail(&mut self, error: impl ToString) {
        self.error.get_or_insert_with(|| RequestError(error.to_string()));
    }
}

impl CpuExecutor {
    /// Runs one step; `probes` are further tokens that stand where the draft token stands, seen by the observer only.
    pub(super) fn step(&mut self, rows: &[DecodeRow], probes: &[Vec<TokenId>]) -> Vec<Result<TokenId, RequestError>> {
        self.steps += 1;
        self.last_step = Step(self.last_step.0 + 1);
        let step = self.last_step;
        let mut members = Vec::with_capacity(rows.len());
        let mut results: Vec<Option<Result<TokenId, RequestError>>> = vec![None; rows.len()];
        let mut indices = Vec::with_capacity(rows.len());
        for (index, row) in rows.iter().enumerate() {
            match self.take_ready(*row) {
                Ok(member) => {
                    members.push(member);
                    indices.push(index);
                }
                Err(error) => results[index] = Some(Err(error)),
            }
        }
        let probes: Vec<&[TokenId]> = indices.iter().map(|&i| probes.get(i).map_or(&[][..], Vec::as_slice)).collect();
        if !members.is_empty() {
            self.forward(step, &mut members, &probes);
        }
        for (index, mut member) in indices.into_iter().zip(members) {
            results[index] = Some(match member.error.take() {
                Some(error) => {
                    member.request.failed = Some(error.to_string());
                    Err(error)
                }
                None => {
                    member.request.position += 1;
                    member.request.steps += 1;
                    self.tokens += 1;
                    self.sample(&mut member.request)
                }
            });
            self.requests.insert(member.id, member.request);
        }
        results.into_iter().map(|result| result.expect("every row has a result")).collect()
    }

    /// Takes a request out for the duration of the step.
    fn take_ready(&mut self, row: DecodeRow) -> Result<Member, RequestError> {
        let DecodeRow { request: id, token } = row;
        let refuse = |problem: &str| Err(RequestError(format!("request {id}: {problem}")));
        match self.requests.get(&id) {
            None => return refuse("expected an admitted request, named once in the batch; found none"),
            Some(Request { failed: Some(problem), .. }) => return refuse(problem),
            Some(request) if !request.has_read_prompt() => return refuse("its prompt has not been read yet"),
            Some(request) if request.position >= self.info.max_context => return refuse("the context is full"),
            Some(request) if request.position >= request.end() => {
                return refuse(
                    "expected no more steps than tokens were asked for; slots and store have room for no more",
                );
            }
            Some(_) if token.index() >= self.info.vocab => return refuse("the token is not in the vocabulary"),
            Some(_) => {}
        }
        let request = self.requests.remove(&id).expect("looked up above");
        Ok(Member { id, request, token, rows: 0..0, has_draft: false, error: None })
    }

    fn forward(&mut self, step: Step, members: &mut [Member], probes: &[&[TokenId]]) {
        let model = self.model.clone();
        let guesses = self.propose(members);
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        for (i, member) in members.iter_mut().enumerate() {
            let (start, position) = (tokens.len(), member.request.position);
            tokens.push(member.token);
            tokens.extend(guesses.get(i));
            tokens.extend(probes[i]);
            member.rows = start..tokens.len();
            member.has_draft = !guesses.is_empty();
            positions.push(position);
            positions.resize(tokens.len(), position + 1);
        }

        let rotation = Rotation::at(&model.decoder.rope, positions);
        let mut x = embed(&model.decoder.weights.embed, tokens);
        for layer in 0..model.decoder.spec.layers {
            self.layer(step, LayerId::from(layer), members, &rotation, &mut x);
        }

        let hidden = model.decoder.spec.hidden;
        let normal: Vec<f32> = members.iter().flat_map(|m| &x[m.rows.start * hidden..][..hidden]).copied().collect();
        let logits = model.decoder.logits(&normal);
        for (member, logits) in members.iter_mut().zip(logits.chunks_exact(model.decoder.spec.vocab)) {
            member.request.logits = logits.to_vec();
        }
    }

    /// The draft head's guess of the token after the given one, for every member.
    fn propose(&mut self, members: &mut [Member]) -> Vec<TokenId> {
        let model = self.model.clone();
        let Some(head) = model.draft.as_ref().filter(|_| self.drafts) else { return Vec::new() };
        let start = Instant::now();
        let mut rows: Vec<DraftRow<'_>> = (members.iter_mut())
            .filter_map(|member| {
                let state = member.request.draft.as_mut()?;
                let position = member.request.position - 1;
                Some(DraftRow { taps: &state.taps, token: member.token, position, cache: &mut state.cache })
            })
            .collect();
        let logits = head.step(&model.decoder.weights.embed, &mut rows, self.draft_window());
        let rows = rows.len();
        let mut guesses = Vec::with_capacity(rows);
        for (member, logits) in members.iter_mut().zip(logits.chunks_exact(logits.len() / rows)) {
            let guess = head.guess(logits);
            guesses.push(guess);
            if let Some(state) = &mut member.request.draft {
                state.last = Some((logits.to_vec(), guess));
            }
        }
        self.tracer.record(Track::Foreground, "draft head", LayerId(0), self.last_step, start);
        guesses
    }

    fn layer(&mut self, step: Step, layer: LayerId, members: &mut [Member], rotation: &Rotation, x: &mut [f32]) {
        let model = self.model.clone();
        self.collect(layer, members);
        self.tap(layer, members, x);
        let shape = model.decoder.attention_shape();
        let start = Instant::now();
        let weights = &model.decoder.weights.layers[layer.index()];
        let qkv = model.decoder.qkv(Regime::Decode, weights, x, rotation);
        self.tracer.record(Track::Foreground, "qkv", layer, step, start);
        let row = |index: usize| &qkv[index * shape.qkv_width()..][..shape.qkv_width()];

        let source = self.sparse_at(layer).map(|s| s.pipeline.query_source());
        let own_query = |m: &Member| shape.split(row(m.rows.start)).0;
        let chosen: Vec<bool> = members.iter_mut().map(|m| self.chooses_now(layer, m, own_query(m))).collect();
        // The working set must hold these members' own choice before their attention: nothing to hide behind.
        self.submit(step, layer, members, &chosen, &own_query);
        self.submit_resident(step, layer, members, &chosen);
        if source == Some(QuerySource::PreviousLayer) {
            self.choose_for_next(step, layer, members, rotation, x);
        }
        if chosen.contains(&true) {
            self.collect(layer, members);
        }
        self.observe(step, layer, members, &|index| shape.split(row(index)).0);
        // A member that a stage failed for may have a full tail still, and takes no further part in what outlives the step.
        for member in members.iter_mut().filter(|m| m.error.is_none()) {
            let (_, key, value) = shape.split(row(member.rows.start));
            let cache = member.request.layers[layer.index()].as_mut().expect("the layer was waited for");
            cache.resident.tail.push(key, value);
        }

        let background = match source {
            Some(QuerySource::Draft | QuerySource::Current) if !self.may_skip_background(layer, members) => source,
            _ => None,
        };
        let full_kv: Vec<Option<FetchedEntries>> =
            members.iter_mut().map(|member| self.fetch_full_kv(layer, member)).collect();
        let sound: Vec<bool> = members.iter().map(|m| m.error.is_none()).collect();
        if let Some(source) = background {
            let start = Instant::now();
            let offset = usize::from(source == QuerySource::Draft);
            self.submit(step, layer, members, &sound, &|m| shape.split(row(m.rows.start + offset)).0);
            self.tracer.record(Track::Foreground, "hand in", layer, step, start);
        }
        let start = Instant::now();
        let views: Vec<AttentionView<'_>> = (members.iter().zip(&full_kv))
            .map(|(member, full_kv)| AttentionView {
                rows: member.rows.clone(),
                has_draft: member.has_draft,
                resident: member.resident(layer.index()),
                full_kv: full_kv.as_ref(),
            })
            .collect();
        let attended = attend(shape, &views, &qkv);
        self.tracer.record(Track::Foreground, "attention", layer, step, start);
        if background.is_some() {
            let start = Instant::now();
            self.submit_resident(step, layer, members, &sound);
            self.tracer.record(Track::Foreground, "hand in", layer, step, start);
        } else if source.is_none() {
            members.iter_mut().for_each(|member| complete_in_place(member, layer, step));
        }

        let start = Instant::now();
        model.decoder.finish_layer(Regime::Decode, weights, &attended, x);
        self.tracer.record(Track::Foreground, "output + mlp", layer, step, start);
    }

    /// Whether a member's working set is chosen by the query that is about to attend, `[kv_heads][group][head_dim]`.
    fn chooses_now(&self, layer: LayerId, member: &mut Member, query: &[f32]) -> bool {
        let Some(Sparse { pipeline, dense_layers, .. }) = self.sparse_at(layer) else { return false };
        let is_due = pipeline.correction().is_some_and(|correction| {
            let before = std::mem::replace(&mut member.request.queries[layer.index()], query.to_vec());
            correction.is_due(self.info.geometry.head_shape(), &before, query)
        });
        let now = match pipeline.query_source() {
            QuerySource::Exact => true,
            QuerySource::PreviousLayer => layer.index() == *dense_layers,
            QuerySource::Current => is_due,
            QuerySource::Draft => false,
        };
        now && member.error.is_none() && !member.sees_full_kv(layer.index())
    }

    /// Hands the next layer to the stages, which choose by the query that it would have with this layer's input `x`.
    fn choose_for_next(&mut self, step: Step, layer: LayerId, members: &mut [Member], rotation: &Rotation, x: &[f32]) {
        let model = self.model.clone();
        let next = LayerId::from(layer.index() + 1);
        let Some(weights) = model.decoder.weights.layers.get(next.index()) else { return };
        let start = Instant::now();
        let shape = model.decoder.attention_shape();
        let qkv = model.decoder.qkv(Regime::Decode, weights, x, rotation);
        self.tracer.record(Track::Foreground, "qkv ahead", layer, step, start);
        let query = |m: &Member| shape.split(&qkv[m.rows.start * shape.qkv_width()..][..shape.qkv_width()]).0;
        let chosen: Vec<bool> = members.iter().map(|m| m.error.is_none() && !m.sees_full_kv(next.index())).collect();
        self.submit(step, next, members, &chosen, &query);
        self.submit_resident(step, next, members, &chosen);
    }

    /// Whether the stages are paused and no request needs them: for a first working set or a completed tail block.
    fn may_skip_background(&self, layer: LayerId, members: &[Member]) -> bool {
        let needs = |m: &Member| m.sees_full_kv(layer.index()) || m.cache(layer.index()).resident.tail.is_full();
        self.paused && !members.iter().any(needs)
    }

    /// Keeps the layer's input of normal rows where the draft head taps it.
    fn tap(&self, layer: LayerId, members: &mut [Member], x: &[f32]) {
        let Some(head) = &self.model.draft else { return };
        let hidden = self.model.decoder.spec.hidden;
        for (slot, _) in head.taps().iter().enumerate().filter(|(_, tapped)| **tapped == layer.index()) {
            for member in members.iter_mut() {
                if let Some(state) = &mut member.request.draft {
                    state.taps[slot * hidden..][..hidden].copy_from_slice(&x[member.rows.start * hidden..][..hidden]);
                }
            }
        }
    }

    fn observe<'a>(&mut self, step: Step, layer: LayerId, members: &[Member], queries_of: &dyn Fn(usize) -> &'a [f32]) {
        let Some(observer) = &mut self.observer else { return };
        for member in members {
            let queries: Vec<f32> = member.rows.clone().flat_map(queries_of).copied().collect();
            let cache = member.cache(layer.index());
            observer.layer(&LayerView {
                layer,
                step,
                request: member.id,
                position: member.request.position,
                queries: &queries,
                has_draft: member.has_draft,
                summaries: &cache.summaries,
                set: &cache.resident.set,
                resident: Some(&cache.resident),
                keys: &cache.resident,
            });
        }
    }

    /// Waits for the layer and puts everybody's device memory back where it belongs.
    pub(super) fn collect(&mut self, layer: LayerId, members: &mut [Member]) {
        let Some(done) = self.sparse.as_mut().and_then(|s| s.pipeline.wait(layer)) else { return };
        if let Some(observer) = &mut self.observer {
            let members: Vec<SelectionMember> = done.members.iter().map(SelectionMember::from).collect();
            let LayerDone { layer, step, link, ref ranking, .. } = done;
            observer.selected(&SelectionView { layer, step, ranking, link, members: &members });
        }
        let geometry = self.info.geometry;
        for returned in done.members {
            self.counters.filled_entries += returned.filled as u64;
            self.counters.admitted_entries += returned.admitted as u64;
            self.counters.deferred_entries += returned.deferred as u64;
            self.counters.link_bytes += (returned.admitted * geometry.entry_bytes()) as u64;
            self.counters.cap_entries += (self.info.cap * geometry.kv_heads) as u64;
            if let Some(member) = members.iter_mut().find(|m| m.id == returned.request) {
                member.request.layers[layer.index()] = Some(returned.cache);
                if let Some(error) = returned.error {
                    member.fail(error);
                }
            } else if let Some(request) = self.requests.get_mut(&returned.request) {
                // In an earlier batch, not in this one.
                request.layers[layer.index()] = Some(returned.cache);
                if let Some(error) = returned.error {
                    request.failed.get_or_insert_with(|| error.to_string());
                }
            }
        }
    }

    /// Hands queries and summaries of the chosen members to the predict stage.
    fn submit<'a>(
        &mut self,
        step: Step,
        layer: LayerId,
        members: &mut [Member],
        chosen: &[bool],
        query_of: &dyn Fn(&Member) -> &'a [f32],
    ) {
        let Some(Sparse { pipeline, .. }) = &mut self.sparse else { return };
        let members: Vec<PredictMember> = (members.iter_mut().zip(chosen).filter(|(_, chosen)| **chosen))
            .map(|(member, _)| {
                let query = query_of(member).to_vec();
                let cache = member.request.layers[layer.index()].take().expect("the layer was waited for");
                let LayerCache { summaries, resident } = cache;
                let tail = &resident.tail;
                let heads = (0..self.info.geometry.kv_heads).map(KvHead::from);
                let completed_keys = tail.is_full().then(|| heads.flat_map(|head| tail.keys(head)).copied().collect());
                member.request.attending = Some(resident);
                PredictMember { request: member.id, query, completed_keys, summaries }
            })
            .collect();
        if !members.is_empty() {
            pipeline.predict(PredictTask { layer, step, members });
        }
    }

    /// Hands the slots of the chosen members to the select stage.
    fn submit_resident(&mut self, step: Step, layer: LayerId, members: &mut [Member], chosen: &[bool]) {
        let Some(Sparse { pipeline, .. }) = &self.sparse else { return };
        let members: Vec<Resident> = (members.iter_mut().zip(chosen).filter(|(_, chosen)| **chosen))
            .map(|(member, _)| member.request.attending.take().expect("the prediction was submitted first"))
            .collect();
        if !members.is_empty() {
            pipeline.select(SelectTask { layer, step, members });
        }
    }

    /// All complete blocks of the layer, `[kv_heads][blocks]`, for the first decode step of a long context.
    fn fetch_full_kv(&self, layer: LayerId, member: &mut Member) -> Option<FetchedEntries> {
        if !member.sees_full_kv(layer.index()) {
            return None;
        }
        let pipeline = &self.sparse.as_ref()?.pipeline;
        let blocks = member.cache(layer.index()).resident.tail.block().index();
        let request = member.id;
        let keys = (0..self.info.geometry.kv_heads).flat_map(|head| {
            (0..blocks).map(move |block| EntryKey {
                request,
                layer,
                block: BlockId::from(block),
                head: KvHead::from(head),
            })
        });
        match pipeline.fetch(keys.collect()) {
            Ok(entries) => Some(entries),
            Err(error) => {
                member.fail(error);
                None
            }
        }
    }
}

/// Dense decoding: a completed tail block moves to its slot, nothing leaves the device.
fn complete_in_place(member: &mut Member, layer: LayerId, step: Step) {
    let resident = &mut member.request.layers[layer.index()].as_mut().expect("a dense layer never leaves").resident;
    if resident.tail.is_full() {
        let block = resident.tail.block();
        let slot = oasis_core::ids::SlotId(block.0);
        for head in (0..resident.set.kv_heads()).map(KvHead::from) {
            resident.set.place(head, Admission { block, slot }, step);
            resident.copy_tail_to(head, slot);
        }
        resident.tail.advance();
    }
}
