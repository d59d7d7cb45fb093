//! The CPU executor: the reference that device executors are compared with.

use crate::cpu::decoder::Decoder;
use crate::cpu::eagle3::DraftHead;
use crate::cpu::observer::StepObserver;
use crate::cpu::prefill::{Prefill, PrefillContext};
use crate::cpu::request::{DraftState, Request};
use crate::draft::Eagle3Head;
use crate::sampling::Sampler;
use crate::spec::DecoderSpec;
use crate::weights::DecoderWeights;
use anyhow::Context;
use oasis_core::config::Budget;
use oasis_core::executor::{
    Admission, DecodeRow, Executor, ExecutorInfo, ExecutorStats, PrefillProgress, RequestError, Sequence,
};
use oasis_core::geometry::{KvDtype, KvFootprint, KvGeometry};
use oasis_core::ids::{LayerId, RequestId, TokenId};
use oasis_core::memory::{KvStore, Reservation, Transport};
use oasis_core::pipeline::{Pipeline, PipelineParts, Tracer};
use oasis_core::policy::{Predictor, QuerySource, Selector, Summarizer};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The policies and memories of a sparse executor.
pub struct CpuPolicies {
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
    /// Blocks per KV head on the device.
    pub budget: Budget,
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

/// Runs a decoder on the CPU, in 32-bit arithmetic, with the KV cache outside its "device" memory.
pub struct CpuExecutor {
    pub(super) info: ExecutorInfo,
    pub(super) decoder: Decoder,
    pub(super) draft: Option<DraftHead>,
    summarizer: Arc<dyn Summarizer>,
    store: Arc<dyn KvStore>,
    /// `None` in dense decoding.
    pub(super) pipeline: Option<Pipeline>,
    pub(super) requests: BTreeMap<RequestId, Request>,
    pub(super) steps: u64,
    pub(super) tokens: u64,
    pub(super) counters: Counters,
    pub(super) observer: Option<Box<dyn StepObserver>>,
    pub(super) tracer: Tracer,
    options: CpuOptions,
    device: KvFootprint,
    device_peak: KvFootprint,
    pool: Arc<rayon::ThreadPool>,
}

impl CpuExecutor {
    /// Starts an executor. A draft head must have been checked against the decoder when it was loaded; it is used by
    /// predictors that ask for the draft token's query, in sparse decoding.
    ///
    /// # Errors
    /// When such a predictor gets no head, or the operating system gives no threads.
    pub fn new(
        spec: DecoderSpec,
        weights: DecoderWeights,
        draft: Option<Arc<Eagle3Head>>,
        policies: CpuPolicies,
        options: CpuOptions,
        tracer: Tracer,
    ) -> anyhow::Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .thread_name(|i| format!("oasis-cpu-{i}"))
            .build()
            .context("starting the CPU executor's threads")?;
        let geometry = KvGeometry {
            layers: spec.layers,
            q_heads: spec.q_heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            block_tokens: options.block_tokens,
            dtype: KvDtype::F32,
        };
        let budget_blocks = match options.budget {
            Budget::Blocks(blocks) => Some(blocks),
            Budget::All => None,
        };
        let CpuPolicies { summarizer, predictor, selector, transport, store } = policies;
        let wants_draft = budget_blocks.is_some() && predictor.query_source() == QuerySource::Draft;
        anyhow::ensure!(
            draft.is_some() || !wants_draft,
            "the predictor ranks by a draft token's query: expected a draft head, found none\n  hint: name one with \
             model.draft, or choose predictor.kind = \"last-query\""
        );
        let draft = draft.filter(|_| wants_draft).map(|head| DraftHead::new(head, spec.layers, spec.max_positions));
        let pipeline = match budget_blocks {
            None => None,
            Some(budget) => {
                let (summarizer, store, tracer) = (summarizer.clone(), store.clone(), tracer.clone());
                let parts = PipelineParts { geometry, budget, summarizer, predictor, selector, transport, store, tracer };
                Some(Pipeline::start(parts).context("starting the pipeline's workers")?)
            }
        };
        let info = ExecutorInfo {
            device: format!("cpu, {} threads", pool.current_num_threads()),
            geometry,
            budget_blocks,
            cap: pipeline.as_ref().map_or(0, Pipeline::cap),
            vocab: spec.vocab,
            max_context: spec.max_positions,
        };
        Ok(Self {
            info,
            decoder: Decoder::new(spec, weights),
            draft,
            summarizer,
            store,
            pipeline,
            requests: BTreeMap::new(),
            steps: 0,
            tokens: 0,
            counters: Counters::default(),
            observer: None,
            tracer,
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

    /// The summarizer, for observers that score queries themselves.
    pub fn summarizer(&self) -> Arc<dyn Summarizer> {
        self.summarizer.clone()
    }

    /// Logits of a request's last token, `[vocab]`; empty before its first.
    pub fn logits(&self, request: RequestId) -> Option<&[f32]> {
        self.requests.get(&request).map(|r| r.logits.as_slice())
    }

    /// The draft head's last guess: of the token after the one that the last step ran.
    pub fn guess(&self, request: RequestId) -> Option<TokenId> {
        self.requests.get(&request)?.draft.as_ref()?.guess
    }

    /// A decode step with probe tokens: each runs where the draft token runs, over the same working set, and is seen by
    /// the observer only. `probes` has one list a row, or is empty.
    pub fn decode_with_probes(&mut self, rows: &[DecodeRow], probes: &[Vec<TokenId>]) -> Vec<Result<TokenId, RequestError>> {
        self.pool.clone().install(|| self.step(rows, probes))
    }

    /// Slots of a KV head for a context of at most `max_blocks` complete blocks.
    fn slots(&self, max_blocks: usize) -> usize {
        self.info.budget_blocks.map_or(max_blocks, |budget| budget.min(max_blocks))
    }

    fn footprint(&self, prompt: usize, tokens: usize, max_blocks: usize) -> KvFootprint {
        let KvGeometry { layers, kv_heads, head_dim, .. } = self.info.geometry;
        let slots_and_tail = self.slots(max_blocks) + 1;
        let summary_rows = if self.pipeline.is_some() { max_blocks * self.summarizer.rows_per_block() } else { 0 };
        KvFootprint {
            working_set: (layers * slots_and_tail * self.info.geometry.block_bytes()) as u64,
            summaries: (layers * kv_heads * summary_rows * head_dim * size_of::<f32>()) as u64,
            draft: self.draft.as_ref().map_or(0, |head| tokens * head.bytes_per_token()) as u64,
            prefill: self.info.geometry.dense_bytes(prompt) / layers as u64,
        }
    }

    /// Chooses the next token from the request's logits.
    pub(super) fn sample(&self, request: &mut Request) -> Result<TokenId, RequestError> {
        let Request { sampler, logits, .. } = request;
        sampler.sample(logits).map_err(|error| RequestError(error.to_string()))
    }

    fn run_prefill(&mut self, id: RequestId, mut request: Request) -> (Request, Result<PrefillProgress, RequestError>) {
        let Some(mut prefill) = request.prefill.take() else {
            return (request, Err(RequestError(format!("request {id}: its prompt has been read already"))));
        };
        let context = PrefillContext {
            decoder: &self.decoder,
            draft: self.draft.as_ref(),
            geometry: &self.info.geometry,
            summarizer: &*self.summarizer,
            pipeline: self.pipeline.as_ref(),
            slots: self.slots(request.max_blocks),
            chunk: self.options.prefill_chunk,
        };
        let total = self.decoder.spec.layers * request.prompt.len();
        if !prefill.advance(&context, id, &mut request.layers, request.max_blocks) {
            let done = prefill.done();
            request.prefill = Some(prefill);
            return (request, Ok(PrefillProgress::Running { done, total }));
        }
        if let Err(error) = prefill.wait_for_store() {
            return (request, Err(RequestError(error.to_string())));
        }
        if let Some(head) = &self.draft {
            prefill.finish_draft(head, &self.decoder, &mut request);
        }
        request.position = request.prompt.len();
        request.logits = self.decoder.logits(prefill.last_row());
        let first = self.sample(&mut request);
        (request, first.map(PrefillProgress::Done))
    }

    /// Takes everything back from the stages.
    fn drain(&mut self) {
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
        let Sequence { request: id, prompt, max_new_tokens, sampling } = sequence;
        anyhow::ensure!(!self.requests.contains_key(&id), "request {id} is admitted already");
        anyhow::ensure!(!prompt.is_empty(), "request {id}: expected at least one prompt token, found none");
        // The last generated token is never run.
        let tokens = prompt.len() + max_new_tokens.saturating_sub(1);
        let max_blocks = self.info.geometry.full_blocks(tokens);
        let footprint = self.footprint(prompt.len(), tokens, max_blocks);
        let (needed, limit) = (footprint.total(), self.options.kv_memory);
        if limit > 0 && self.device.total() + needed > limit {
            let reason = format!("device KV memory: {needed} bytes needed, {limit} in all, {} in use (device.kv_memory)", self.device.total());
            return Ok(if needed > limit { Admission::Refused { reason } } else { Admission::Wait { reason } });
        }
        if self.pipeline.is_some() {
            match self.store.reserve(id, &self.info.geometry, max_blocks) {
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
        let prefill = Prefill::new(&self.decoder, self.draft.as_ref(), &prompt);
        let draft = self.draft.as_ref().map(|head| DraftState {
            cache: head.new_cache(tokens),
            taps: vec![0.0; head.taps_width()],
            guess: None,
        });
        let request = Request {
            prompt,
            max_blocks,
            sampler: Sampler::new(sampling),
            prefill: Some(prefill),
            position: 0,
            steps: 0,
            layers: vec![None; self.info.geometry.layers],
            attending: None,
            failed: None,
            draft,
            footprint,
            logits: Vec::new(),
        };
        self.requests.insert(id, request);
        Ok(Admission::Admitted)
    }

    fn prefill(&mut self, id: RequestId) -> Result<PrefillProgress, RequestError> {
        let Some(request) = self.requests.remove(&id) else {
            return Err(RequestError(format!("request {id}: expected an admitted request, found none")));
        };
        let (mut request, result) = self.pool.clone().install(|| self.run_prefill(id, request));
        if request.prefill.is_none() {
            // The layer's full KV is gone from the device.
            self.device -= KvFootprint { prefill: std::mem::take(&mut request.footprint.prefill), ..Default::default() };
        }
        self.requests.insert(id, request);
        result
    }

    fn decode(&mut self, rows: &[DecodeRow]) -> anyhow::Result<Vec<Result<TokenId, RequestError>>> {
        Ok(self.decode_with_probes(rows, &[]))
    }

    fn release(&mut self, id: RequestId) {
        self.drain();
        if let Some(request) = self.requests.remove(&id) {
            self.device -= request.footprint;
            self.store.release(id);
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
            store: self.store.usage(),
            pipeline: self.pipeline.as_ref().map(Pipeline::metrics).unwrap_or_default(),
        }
    }
}
