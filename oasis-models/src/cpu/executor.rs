//! The CPU executor: the reference that device executors are compared with.

use crate::cpu::eagle3::{DraftHead, DraftWindow};
use crate::cpu::layer_kv::CutContext;
use crate::cpu::model::CpuModel;
use crate::cpu::prefill::{Prefill, PromptState};
use crate::cpu::request::Request;
use crate::sampling::Sampler;
use anyhow::Context;
use oasis_core::executor::{
    Admission, DecodeRow, Executor, ExecutorInfo, ExecutorStats, Logits, PrefillProgress, RequestError, Sequence,
    TooSmall,
};
use oasis_core::geometry::{KvDtype, KvFootprint, KvGeometry};
use oasis_core::ids::{LayerId, RequestId, Step, TokenId};
use oasis_core::memory::{KvStore, Reservation, Summaries, Transport};
use oasis_core::observer::StepObserver;
use oasis_core::pipeline::{Pipeline, PipelineParts, Tracer, WorkerPriority};
use oasis_core::policy::{Predictor, QuerySource, Selector, Summarizer};
use oasis_core::sampling::SamplingParams;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How much of the KV cache stays on the device.
pub enum Residency {
    /// All of it: dense decoding.
    Dense,
    /// A working set a KV head, chosen by policies; the rest is in a store.
    Sparse(SparseParts),
}

/// The policies and memories of sparse decoding.
pub struct SparseParts {
    /// Blocks per KV head on the device, K.
    pub budget_blocks: usize,
    /// First layers that keep every block on the device, and have neither summaries nor background stages.
    pub dense_layers: usize,
    /// Newest blocks of its own KV that the draft head keeps and attends to; `None`: all.
    pub draft_window: Option<usize>,
    /// Summarises blocks.
    pub summarizer: Arc<dyn Summarizer>,
    /// Ranks them.
    pub predictor: Box<dyn Predictor>,
    /// Plans admissions.
    pub selector: Box<dyn Selector>,
    /// Moves entries.
    pub transport: Box<dyn Transport>,
    /// Holds the full KV.
    pub store: Arc<dyn KvStore>,
}

/// Sizes of a CPU executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Prompt tokens of one prefill chunk.
    pub prefill_chunk: usize,
    /// Threads; 0 takes every core.
    pub threads: usize,
    /// Most bytes of KV on the device; 0 sets no limit.
    pub kv_memory: u64,
}

/// What an executor counts.
#[derive(Default)]
pub(super) struct Counters {
    pub filled_entries: u64,
    pub admitted_entries: u64,
    pub deferred_entries: u64,
    pub link_bytes: u64,
    pub cap_entries: u64,
}

/// What sparse decoding adds to an executor.
pub(super) struct Sparse {
    pub pipeline: Pipeline,
    pub dense_layers: usize,
    pub draft_window: Option<usize>,
    pub summarizer: Arc<dyn Summarizer>,
    pub store: Arc<dyn KvStore>,
}

/// Runs a decoder on the CPU, in 32-bit arithmetic, with the KV cache outside its "device" memory.
pub struct CpuExecutor {
    pub(super) info: ExecutorInfo,
    pub(super) model: Arc<CpuModel>,
    /// Whether the predictor ranks by the draft token's query.
    pub(super) drafts: bool,
    /// `None` in dense decoding.
    pub(super) sparse: Option<Sparse>,
    pub(super) requests: BTreeMap<RequestId, Request>,
    pub(super) steps: u64,
    /// The newest step, by which working sets remember when a block was wanted: never behind that of a request that
    /// another executor handed over.
    pub(super) last_step: Step,
    pub(super) tokens: u64,
    pub(super) counters: Counters,
    pub(super) observer: Option<Box<dyn StepObserver>>,
    pub(super) tracer: Tracer,
    pub(super) paused: bool,
    options: CpuOptions,
    pub(super) device: KvFootprint,
    device_peak: KvFootprint,
    pool: Arc<rayon::ThreadPool>,
}

impl CpuExecutor {
    /// Starts an executor. The model's draft head is used by predictors that ask for the draft token's query, in sparse
    /// decoding.
    ///
    /// # Errors
    /// When such a predictor gets no head, or the operating system gives no threads.
    pub fn new(
        model: Arc<CpuModel>,
        residency: Residency,
        options: CpuOptions,
        tracer: Tracer,
    ) -> anyhow::Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .thread_name(|i| format!("oasis-cpu-{i}"))
            .build()
            .context("starting the CPU executor's threads")?;
        let spec = model.spec();
        let geometry = KvGeometry {
            layers: spec.layers,
            q_heads: spec.q_heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            block_tokens: options.block_tokens,
            dtype: KvDtype::F32,
        };
        let (mut sparse, mut budget_blocks, mut drafts) = (None, None, false);
        if let Residency::Sparse(SparseParts {
            budget_blocks: budget,
            dense_layers,
            draft_window,
            summarizer,
            predictor,
            selector,
            transport,
            store,
        }) = residency
        {
            budget_blocks = Some(budget);
            drafts = predictor.query_source() == QuerySource::Draft;
            anyhow::ensure!(
                model.has_draft() || !drafts,
                "the predictor ranks by a draft token's query: expected a draft head, found none\n  hint: name one with \
                 model.draft, or choose predictor.kind = \"last-query\""
            );
            let (parts_summarizer, parts_store, tracer) = (summarizer.clone(), store.clone(), tracer.clone());
            let parts = PipelineParts {
                geometry,
                budget,
                summarizer: parts_summarizer,
                predictor,
                selector,
                transport,
                store: parts_store,
                priority: WorkerPriority::WhenIdle,
                tracer,
            };
            let pipeline = Pipeline::start(parts).context("starting the pipeline's workers")?;
            sparse = Some(Sparse { pipeline, dense_layers, draft_window, summarizer, store });
        }
        let info = ExecutorInfo {
            device: format!("cpu, {} threads", pool.current_num_threads()),
            geometry,
            budget_blocks,
            cap: sparse.as_ref().map_or(0, |s| s.pipeline.cap()),
            vocab: spec.vocab,
            max_context: spec.max_positions,
        };
        Ok(Self {
            info,
            model,
            drafts,
            sparse,
            requests: BTreeMap::new(),
            steps: 0,
            last_step: Step(0),
            tokens: 0,
            counters: Counters::default(),
            observer: None,
            tracer,
            paused: false,
            options,
            device: KvFootprint::default(),
            device_peak: KvFootprint::default(),
            pool: Arc::new(pool),
        })
    }

    /// Sets or removes the observer of decode steps.
    pub fn set_observer(&mut self, observer: Option<Box<dyn StepObserver>>) {
        self.observer = observer;
    }

    /// Pauses the background stages, to measure what they cost: working sets then change only where a first one is
    /// chosen or a tail block completes.
    pub fn pause_background(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Whose query the predictor ranks by; `None` in dense decoding.
    pub fn query_source(&self) -> Option<QuerySource> {
        self.sparse.as_ref().map(|s| s.pipeline.query_source())
    }

    /// The summarizer of sparse decoding, for observers that score queries themselves.
    pub fn summarizer(&self) -> Option<Arc<dyn Summarizer>> {
        self.sparse.as_ref().map(|s| s.summarizer.clone())
    }

    /// Logits of a request's last token, `[vocab]`; empty before its first.
    pub fn logits(&self, request: RequestId) -> Option<&[f32]> {
        self.requests.get(&request).map(|r| r.logits.as_slice())
    }

    /// What the draft head said in a request's last step: logits `[draft_vocab]` and the token they guess, the one
    /// after the token that the step ran.
    pub fn draft(&self, request: RequestId) -> Option<(&[f32], TokenId)> {
        let (logits, guess) = self.requests.get(&request)?.draft.as_ref()?.last.as_ref()?;
        Some((logits, *guess))
    }

    /// A decode step with probe tokens: each runs where the draft token runs, over the same working set, and is seen by
    /// the observer only. `probes` has one list a row, or is empty.
    pub fn decode_with_probes(
        &mut self,
        rows: &[DecodeRow],
        probes: &[Vec<TokenId>],
    ) -> Vec<Result<TokenId, RequestError>> {
        self.pool.clone().install(|| self.step(rows, probes))
    }

    /// The parts of sparse decoding in a layer that decodes sparsely.
    pub(super) fn sparse_at(&self, layer: LayerId) -> Option<&Sparse> {
        self.sparse.as_ref().filter(|sparse| layer.index() >= sparse.dense_layers)
    }

    /// Slots of a KV head of one layer for a context of at most `max_blocks` complete blocks.
    pub(super) fn slots(&self, layer: LayerId, max_blocks: usize) -> usize {
        let budget = self.info.budget_blocks.filter(|_| self.sparse_at(layer).is_some());
        budget.map_or(max_blocks, |budget| budget.min(max_blocks))
    }

    fn footprint(&self, prompt: usize, tokens: usize, max_blocks: usize) -> KvFootprint {
        let KvGeometry { layers, kv_heads, .. } = self.info.geometry;
        let each_layer = || (0..layers).map(LayerId::from);
        let slots_and_tails: usize = each_layer().map(|layer| self.slots(layer, max_blocks) + 1).sum();
        let summary_words: usize = (each_layer().filter_map(|layer| self.sparse_at(layer)))
            .map(|s| kv_heads * max_blocks * Summaries::block_words(&self.info.geometry, &*s.summarizer))
            .sum();
        KvFootprint {
            working_set: (slots_and_tails * self.info.geometry.block_bytes()) as u64,
            summaries: (summary_words * size_of::<u32>()) as u64,
            draft: self.head().map_or(0, |head| self.draft_positions(tokens) * head.bytes_per_token()) as u64,
            prefill: self.info.geometry.dense_bytes(prompt) / layers as u64,
        }
    }

    /// Most positions that the draft head keeps of `tokens`.
    fn draft_positions(&self, tokens: usize) -> usize {
        let window = self.draft_window().blocks.map(|blocks| blocks * self.info.geometry.block_tokens);
        window.map_or(tokens, |window| window.min(tokens))
    }

    /// Chooses the next token from the request's logits.
    pub(super) fn sample(&self, request: &mut Request) -> Result<TokenId, RequestError> {
        let Request { sampler, logits, .. } = request;
        sampler.sample(logits).map(TokenId).map_err(|error| RequestError(error.to_string()))
    }

    /// The draft head, where the predictor asks for it.
    pub(super) fn head(&self) -> Option<&DraftHead> {
        self.model.draft.as_ref().filter(|_| self.drafts)
    }

    /// What the draft head attends to.
    pub(super) fn draft_window(&self) -> DraftWindow {
        DraftWindow {
            geometry: self.info.geometry,
            blocks: self.sparse.as_ref().and_then(|sparse| sparse.draft_window),
        }
    }

    fn cut_context(&self, layer: LayerId, max_blocks: usize) -> CutContext<'_> {
        CutContext {
            geometry: self.info.geometry,
            offload: self.sparse_at(layer).map(|s| (&s.pipeline, &*s.summarizer)),
            slots: self.slots(layer, max_blocks),
            max_blocks,
        }
    }

    fn run_prefill(&self, id: RequestId, request: &mut Request) -> Result<PrefillProgress, RequestError> {
        let Some(prefill) = &mut request.prefill else {
            return Err(RequestError(format!("request {id}: its prompt has been read already")));
        };
        let (decoder, head) = (&self.model.decoder, self.head());
        let chunk = self.options.prefill_chunk;
        if let Some((layer, kv)) = self.pool.install(|| prefill.advance(decoder, head, chunk)) {
            let (cache, offload) = kv.cut(&self.cut_context(layer, request.max_blocks), id, layer);
            request.layers[layer.index()] = Some(cache);
            request.offloads.extend(offload);
        }
        if !prefill.is_done(decoder) {
            let total = decoder.spec.layers * request.prompt.len();
            return Ok(PrefillProgress::Running { done: prefill.done(), total });
        }
        let (prompt, start) = (&request.prompt, self.draft_window().start(request.prompt.len() - 1));
        let draft_state = |head| prefill.draft_state(head, decoder, prompt, start);
        let (logits, draft) = self.pool.install(|| (prefill.logits(decoder), head.map(draft_state)));
        (request.logits, request.draft) = (logits, draft);
        request.prefill = None;
        self.begin_decoding(request).map(PrefillProgress::Done)
    }

    /// Waits until the prompt's blocks are in the store, then chooses the first token.
    fn begin_decoding(&self, request: &mut Request) -> Result<TokenId, RequestError> {
        request.finish_offloads().map_err(|error| RequestError(error.to_string()))?;
        request.position = request.prompt.len();
        self.sample(request)
    }

    /// Sets memory aside for a prompt that was read before, and gives its first token: one prefill serves several
    /// executors of the same model.
    ///
    /// # Errors
    /// [`TooSmall`] when there is no room; else when sampling parameters are impossible or the store fails. The request holds nothing then.
    pub fn resume(
        &mut self,
        state: &PromptState,
        request: RequestId,
        max_new_tokens: usize,
        sampling: SamplingParams,
    ) -> anyhow::Result<TokenId> {
        // Not a matter of room.
        Sampler::new(sampling)?;
        let sequence = Sequence { request, prompt: state.prompt.clone(), max_new_tokens, sampling };
        match self.admit(sequence)? {
            Admission::Admitted => {}
            Admission::Wait { reason } | Admission::Refused { reason } => return Err(TooSmall(reason).into()),
        }
        let mut admitted = self.requests.remove(&request).expect("just admitted");
        let mut offloads = Vec::new();
        let layers = (state.layers.iter().enumerate()).map(|(layer, kv)| {
            let layer = LayerId::from(layer);
            let (cache, offload) = kv.cut(&self.cut_context(layer, admitted.max_blocks), request, layer);
            offloads.extend(offload);
            Some(cache)
        });
        admitted.layers = layers.collect();
        admitted.offloads = offloads;
        admitted.logits = state.logits.clone();
        admitted.draft = state.draft.clone().filter(|_| self.drafts);
        if let Some(draft) = &mut admitted.draft {
            draft.cache.slide(self.draft_window());
        }
        admitted.prefill = None;
        self.give_back_prefill(&mut admitted);
        let first = self.begin_decoding(&mut admitted);
        self.requests.insert(request, admitted);
        if first.is_err() {
            self.release(request);
        }
        Ok(first?)
    }

    /// Sets memory aside for a request; its prompt is read here, or expected from another executor.
    pub(super) fn set_aside(&mut self, sequence: Sequence, is_expected: bool) -> anyhow::Result<Admission> {
        let Sequence { request: id, prompt, max_new_tokens, sampling } = sequence;
        anyhow::ensure!(!self.requests.contains_key(&id), "request {id} is admitted already");
        let sampler = match Sampler::new(sampling) {
            Ok(sampler) => sampler,
            Err(error) => return Ok(Admission::Refused { reason: error.to_string() }),
        };
        anyhow::ensure!(!prompt.is_empty(), "request {id}: expected at least one prompt token, found none");
        // The last generated token is never run.
        let tokens = prompt.len() + max_new_tokens.saturating_sub(1);
        let max_blocks = self.info.geometry.full_blocks(tokens);
        let mut footprint = self.footprint(prompt.len(), tokens, max_blocks);
        if is_expected {
            footprint.prefill = 0;
        }
        let (needed, limit) = (footprint.total(), self.options.kv_memory);
        if limit > 0 && self.device.total() + needed > limit {
            let reason = format!(
                "device KV memory: {needed} bytes needed, {limit} in all, {} in use (device.kv_memory)",
                self.device.total()
            );
            return Ok(if needed > limit { Admission::Refused { reason } } else { Admission::Wait { reason } });
        }
        if let Some(Sparse { store, .. }) = &self.sparse {
            match store.reserve(id, &self.info.geometry, max_blocks) {
                Reservation::Granted => {}
                Reservation::Full { needed, free } => {
                    return Ok(Admission::Wait { reason: format!("KV store: {needed} bytes needed, {free} free") });
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
        self.device += footprint;
        if self.device.total() > self.device_peak.total() {
            self.device_peak = self.device;
        }
        let prefill = (!is_expected).then(|| Prefill::new(&self.model.decoder, self.head(), &prompt));
        let request = Request {
            prompt,
            max_blocks,
            sampler,
            prefill,
            is_expected,
            offloads: Vec::new(),
            max_new_tokens,
            position: 0,
            steps: 0,
            layers: vec![None; self.info.geometry.layers],
            queries: vec![Vec::new(); self.info.geometry.layers],
            attending: None,
            failed: None,
            draft: None,
            footprint,
            logits: Vec::new(),
        };
        self.requests.insert(id, request);
        Ok(Admission::Admitted)
    }

    /// The full KV of the last layer is gone from the device.
    fn give_back_prefill(&mut self, request: &mut Request) {
        let prefill = std::mem::take(&mut request.footprint.prefill);
        self.device -= KvFootprint { prefill, ..KvFootprint::default() };
    }

    /// Takes everything back from the stages.
    pub(super) fn drain(&mut self) {
        for layer in (0..self.info.geometry.layers).map(LayerId::from) {
            self.collect(layer, &mut []);
        }
    }
}

impl Executor for CpuExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn admit(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        self.set_aside(sequence, false)
    }

    fn prefill(&mut self, id: RequestId) -> Result<PrefillProgress, RequestError> {
        let Some(mut request) = self.requests.remove(&id) else {
            return Err(RequestError(format!("request {id}: expected an admitted request, found none")));
        };
        let result = self.run_prefill(id, &mut request);
        if request.prefill.is_none() {
            self.give_back_prefill(&mut request);
        }
        self.requests.insert(id, request);
        result
    }

    fn decode(&mut self, rows: &[DecodeRow]) -> anyhow::Result<Vec<Result<TokenId, RequestError>>> {
        Ok(self.decode_with_probes(rows, &[]))
    }

    fn release(&mut self, id: RequestId) {
        self.drain();
        if let Some(mut request) = self.requests.remove(&id) {
            // A late write must not meet a later request of the same id; that it may fail no longer matters.
            let _ = request.finish_offloads();
            self.device -= request.footprint;
            if let Some(sparse) = &self.sparse {
                sparse.store.release(id);
            }
            if let Some(observer) = &mut self.observer {
                observer.release(id);
            }
        }
    }

    fn stats(&self) -> ExecutorStats {
        let Counters { filled_entries, admitted_entries, deferred_entries, link_bytes, cap_entries } = self.counters;
        ExecutorStats {
            steps: self.steps,
            tokens: self.tokens,
            filled_entries,
            admitted_entries,
            link_bytes,
            deferred_entries,
            cap_entries,
            device: self.device,
            device_peak: self.device_peak,
            store: self.sparse.as_ref().map(|s| s.store.usage()).unwrap_or_default(),
            pipeline: self.sparse.as_ref().map(|s| s.pipeline.metrics()),
        }
    }
}

impl Logits for CpuExecutor {
    fn last_logits(&self, request: RequestId) -> anyhow::Result<Vec<f32>> {
        let logits = self.logits(request).filter(|logits| !logits.is_empty());
        Ok(logits.with_context(|| format!("request {request}: expected one that has logits, found none"))?.to_vec())
    }
}
