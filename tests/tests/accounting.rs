//! Memory and link stay within what was promised, whatever comes and goes; at the end nothing is held.

use oasis_core::engine::{Engine, SubmitError};
use oasis_core::executor::{Admission, DecodeRow, Executor, PrefillProgress, Sequence};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::observer::{LayerView, StepObserver};
use oasis_core::pipeline::Tracer;
use oasis_core::sampling::SamplingParams;
use oasis_core::testkit::{Random, for_all};
use oasis_models::cpu::{CpuExecutor, CpuOptions, Residency};
use oasis_tests::drive::{Answers, assert_nothing_held, drive, request, solo};
use oasis_tests::models::{parts, start, step};
use oasis_tests::synthetic::{self, CONTEXT, HEAD_DIM, KV_HEADS, LAYERS, VOCAB};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What the test knows of a request.
struct Live {
    prompt: usize,
    max_new_tokens: usize,
    /// Token to run next and tokens generated, once the prompt is in.
    decoding: Option<(TokenId, usize)>,
}

/// One random executor and what it promised.
struct Scene {
    executor: CpuExecutor,
    block_tokens: usize,
    budget: usize,
    cap: usize,
    kv_memory: u64,
    live: BTreeMap<RequestId, Live>,
    /// Rows decoded so far.
    rows: u64,
    /// Rows whose admissions the last call may have counted, and those that a later call will count: a layer is
    /// collected when it is needed again.
    counted: u64,
    uncounted: u64,
    admitted: u64,
    case: String,
    held: Arc<Mutex<Vec<u64>>>,
}

/// Notes the bytes that are really there.
struct Scales {
    rows_per_block: usize,
    held: Arc<Mutex<Vec<u64>>>,
}

impl StepObserver for Scales {
    fn layer(&mut self, view: &LayerView<'_>) {
        let resident = view.resident.unwrap();
        assert!(view.summaries.blocks() <= resident.tail.block().index() + 1);
        let rows = view.summaries.bytes() / (KV_HEADS * HEAD_DIM * 4) as u64;
        assert_eq!(rows % self.rows_per_block as u64, 0);
        let mut held = self.held.lock().unwrap();
        held.push(resident.bytes());
    }
}

impl Scene {
    fn new(random: &mut Random) -> Self {
        let block_tokens = random.pick(&[1, 5, 16, 32]);
        let budget = random.pick(&[1, 2, 3, 7, 20, CONTEXT + 1]);
        let fetch_ratio = random.pick(&["0.0", "0.01", "0.3", "0.5", "1.0"]);
        let predictor = random.pick(&["draft-query", "last-query", "exact"]);
        let summarizer = random.pick(&["quest", "mean"]);
        let entry = 2 * block_tokens * HEAD_DIM * 4;
        let kv_memory = random.pick(&[0, 40_000, 150_000, 400_000]);
        let capacity = LAYERS * KV_HEADS * entry * random.pick(&[400, 40, 4000, 100_000]) / block_tokens;
        let settings = [
            format!("predictor.kind={predictor}"),
            format!("summarizer.kind={summarizer}"),
            format!("selector.fetch_ratio={fetch_ratio}"),
            format!("store.capacity={capacity}"),
        ];
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let model = synthetic::model(1);
        let parts = parts(&model, budget, block_tokens, &settings);
        let rows_per_block = parts.summarizer.rows_per_block();
        let options = CpuOptions { block_tokens, prefill_chunk: random.pick(&[1, 16, 23, 512]), threads: 1, kv_memory };
        let mut executor = CpuExecutor::new(model, Residency::Sparse(parts), options, Tracer::default()).unwrap();
        let held = Arc::default();
        executor.set_observer(Some(Box::new(Scales { rows_per_block, held: Arc::clone(&held) })));
        let cap = executor.info().cap;
        let expected = match fetch_ratio {
            "0.0" => 0,
            ratio => ((ratio.parse::<f64>().unwrap() * budget as f64) as usize).max(1),
        };
        assert_eq!(cap, expected, "C of K {budget} and fetch_ratio {fetch_ratio}");
        let case = format!("block_tokens {block_tokens}, K {budget}, kv_memory {kv_memory}, {settings:?}");
        Self {
            executor,
            block_tokens,
            budget,
            cap,
            kv_memory,
            live: BTreeMap::new(),
            rows: 0,
            counted: 0,
            uncounted: 0,
            admitted: 0,
            case,
            held,
        }
    }

    fn entry_bytes(&self) -> u64 {
        (2 * self.block_tokens * HEAD_DIM * 4) as u64
    }

    /// Slots and tail of a request.
    fn entries(&self, request: &Live) -> u64 {
        let blocks = (request.prompt + request.max_new_tokens - 1) / self.block_tokens;
        (LAYERS * KV_HEADS * (self.budget.min(blocks) + 1)) as u64
    }

    fn check(&mut self) {
        let (stats, case) = (self.executor.stats(), &self.case);
        let entries: u64 = self.live.values().map(|request| self.entries(request)).sum();
        assert_eq!(stats.device.working_set, entries * self.entry_bytes(), "{case}: the working sets");
        let bound = (self.live.len() * LAYERS * KV_HEADS * (self.budget + 1)) as u64 * self.entry_bytes();
        assert!(stats.device.working_set <= bound, "{case}");
        let reading = self.live.values().filter(|r| r.decoding.is_none());
        let full_layer: usize = reading.map(|r| r.prompt * KV_HEADS * 2 * HEAD_DIM * 4).sum();
        assert_eq!(stats.device.prefill, full_layer as u64, "{case}: the layer that a prefill is in");
        if self.kv_memory > 0 {
            assert!(stats.device.total() <= self.kv_memory, "{case}: {} bytes on the device", stats.device.total());
            assert!(stats.device_peak.total() <= self.kv_memory, "{case}");
        }
        assert!(stats.device_peak.total() >= stats.device.total(), "{case}");

        let a_row = (LAYERS * KV_HEADS * self.cap) as u64;
        assert!(stats.admitted_entries <= self.rows * a_row, "{case}: more than C a head and step");
        let call = stats.admitted_entries - self.admitted;
        assert!(call <= self.counted * a_row, "{case}: {call} admissions in one call");
        self.admitted = stats.admitted_entries;
        self.counted = 0;
        assert!(stats.admitted_entries <= stats.cap_entries, "{case}");
        assert_eq!(stats.link_bytes, stats.admitted_entries * self.entry_bytes(), "{case}");
        assert_eq!(stats.tokens, self.rows, "{case}");

        let store = stats.store;
        assert!(store.used <= store.reserved && store.reserved <= store.capacity, "{case}: {store:?}");
        assert_eq!(store.requests, self.live.len(), "{case}: requests with a reservation");
    }

    fn admit(&mut self, random: &mut Random, id: RequestId) {
        let edge = self.block_tokens * random.pick(&[1, 2, 3, self.budget.min(60) + 1]);
        let prompt = (edge + random.below(3)).saturating_sub(1).clamp(1, 300);
        let max_new_tokens = random.within(1, 40);
        let tokens = (0..prompt).map(|_| TokenId::from(random.below(VOCAB))).collect();
        let sequence = Sequence { request: id, prompt: tokens, max_new_tokens, sampling: SamplingParams::default() };
        let free = self.live.is_empty();
        match self.executor.admit(sequence).unwrap() {
            Admission::Admitted => {
                self.live.insert(id, Live { prompt, max_new_tokens, decoding: None });
            }
            Admission::Wait { reason } => {
                assert!(!free, "{}: waits although nothing runs: {reason}", self.case);
                assert!(reason.contains("needed"), "{reason}");
            }
            Admission::Refused { reason } => {
                assert!(reason.contains("device.kv_memory") || reason.contains("store.capacity"), "{reason}");
            }
        }
    }

    fn prefill(&mut self, id: RequestId) {
        if let PrefillProgress::Done(token) = self.executor.prefill(id).unwrap() {
            self.live.get_mut(&id).unwrap().decoding = Some((token, 1));
        }
    }

    /// Decodes some of those that can go on.
    fn decode(&mut self, random: &mut Random) {
        let ready = self.live.iter().filter_map(|(&request, live)| {
            let (token, generated) = live.decoding?;
            (generated < live.max_new_tokens).then_some(DecodeRow { request, token })
        });
        let mut rows: Vec<DecodeRow> = ready.collect();
        random.shuffle(&mut rows);
        rows.truncate(random.within(1, 8));
        let tokens = self.executor.decode(&rows).unwrap();
        self.rows += rows.len() as u64;
        self.counted = self.uncounted + rows.len() as u64;
        if !rows.is_empty() {
            self.uncounted = rows.len() as u64;
        }
        for (row, token) in rows.iter().zip(tokens) {
            let token = token.unwrap_or_else(|error| panic!("{}: {error}", self.case));
            let decoding = &mut self.live.get_mut(&row.request).unwrap().decoding;
            *decoding = decoding.map(|(_, generated)| (token, generated + 1));
        }
        let held: u64 = self.held.lock().unwrap().drain(..).sum();
        let entries: u64 = rows.iter().map(|row| self.entries(&self.live[&row.request])).sum();
        assert_eq!(held, entries * self.entry_bytes(), "{}: bytes of the slots and tails", self.case);
    }

    fn release(&mut self, id: RequestId) {
        self.executor.release(id);
        self.counted = std::mem::take(&mut self.uncounted);
        self.live.remove(&id);
    }

    fn pick(&self, random: &mut Random, wanted: impl Fn(&Live) -> bool) -> Option<RequestId> {
        let ids: Vec<RequestId> = self.live.iter().filter(|(_, r)| wanted(r)).map(|(&id, _)| id).collect();
        (!ids.is_empty()).then(|| random.pick(&ids))
    }
}

#[test]
fn memory_and_link_stay_within_bounds_in_any_order_of_events() {
    for_all(400, |random| {
        let mut scene = Scene::new(random);
        let mut next = 0;
        for _ in 0..80 {
            match random.below(10) {
                0 | 1 if scene.live.len() < 6 => {
                    next += 1;
                    scene.admit(random, RequestId(next));
                }
                2..=4 => {
                    for _ in 0..random.within(1, 6) {
                        if let Some(id) = scene.pick(random, |r| r.decoding.is_none()) {
                            scene.prefill(id);
                        }
                    }
                }
                5 if random.one_in(3) => {
                    if let Some(id) = scene.pick(random, |_| true) {
                        scene.release(id);
                    }
                }
                _ => scene.decode(random),
            }
            scene.check();
        }
        for id in scene.live.keys().copied().collect::<Vec<_>>() {
            scene.release(id);
        }
        assert_nothing_held(&scene.executor);
    });
}

fn executor(block_tokens: usize, budget: usize, kv_memory: u64, settings: &[&str]) -> CpuExecutor {
    let model = synthetic::model(1);
    let parts = parts(&model, budget, block_tokens, settings);
    let options = CpuOptions { block_tokens, prefill_chunk: 64, threads: 1, kv_memory };
    CpuExecutor::new(model, Residency::Sparse(parts), options, Tracer::default()).unwrap()
}

fn prompt(tokens: usize, seed: u32) -> Vec<TokenId> {
    (0..tokens as u32).map(|i| TokenId((i * i * (seed + 3) + 7 * i + seed) % VOCAB as u32)).collect()
}

#[test]
fn a_full_store_makes_requests_wait_and_a_small_one_refuses_with_a_hint() {
    // Room for 20 blocks of both layers.
    let capacity = format!("store.capacity={}", 20 * LAYERS * KV_HEADS * 2 * 16 * HEAD_DIM * 4);
    let mut engine = Engine::new(executor(16, 4, 0, &[&capacity]), 8);
    let alone: Vec<_> = (0..3).map(|seed| solo(&mut engine, request(&prompt(140, seed), 10))).collect();

    // Nine blocks each: two at a time.
    let ids = [0, 1, 2].map(|seed| engine.submit(request(&prompt(140, seed), 10)).unwrap());
    let large = engine.submit(request(&prompt(330, 9), 10)).unwrap();
    let (mut answers, mut widest) = (Answers::new(), 0);
    drive(&mut engine, &mut answers, |engine, _| {
        widest = widest.max(engine.executor().stats().store.requests);
    });
    assert_eq!(widest, 2, "requests with blocks in the store at one time");
    for (id, alone) in ids.iter().zip(&alone) {
        assert!(answers[id] == *alone);
    }
    let error = answers[&large].error.as_deref().unwrap();
    assert!(error.contains("KV store is too small") && error.contains("hint: raise store.capacity"), "{error}");
    assert_nothing_held(engine.executor());
}

#[test]
fn device_memory_makes_requests_wait_or_refuses_them() {
    let one = {
        let mut executor = executor(16, 4, 0, &[]);
        let sequence = Sequence {
            request: RequestId(1),
            prompt: prompt(140, 0),
            max_new_tokens: 10,
            sampling: SamplingParams::default(),
        };
        executor.admit(sequence).unwrap();
        executor.stats().device.total()
    };
    let mut engine = Engine::new(executor(16, 4, 2 * one, &[]), 8);
    let alone: Vec<_> = (0..3).map(|seed| solo(&mut engine, request(&prompt(140, seed), 10))).collect();
    let ids = [0, 1, 2].map(|seed| engine.submit(request(&prompt(140, seed), 10)).unwrap());
    let large = engine.submit(request(&prompt(450, 9), 10)).unwrap();
    let mut answers = Answers::new();
    drive(&mut engine, &mut answers, |engine, _| {
        assert!(engine.executor().stats().device.total() <= 2 * one);
    });
    for (id, alone) in ids.iter().zip(&alone) {
        assert!(answers[id] == *alone);
    }
    let error = answers[&large].error.as_deref().unwrap();
    assert!(error.contains("device KV memory") && error.contains("device.kv_memory"), "{error}");
    assert!(engine.executor().stats().device_peak.total() <= 2 * one);
    assert_nothing_held(engine.executor());
}

#[test]
fn the_longest_context_is_decoded_to_its_end_and_no_further() {
    for block_tokens in [1, 5, 16, 32] {
        for prompt_tokens in [1, CONTEXT - 17, CONTEXT] {
            let mut engine = Engine::new(executor(block_tokens, 3, 0, &[]), 1);
            let most = CONTEXT - prompt_tokens + 1;
            let answer = solo(&mut engine, request(&prompt(prompt_tokens, 4), most));
            assert_eq!((answer.tokens.len(), answer.error), (most, None), "{block_tokens}, {prompt_tokens}");
            let error = engine.submit(request(&prompt(prompt_tokens, 4), most + 1)).unwrap_err();
            assert!(matches!(error, SubmitError::TooLong { max_context: CONTEXT, .. }), "{error}");
            assert_nothing_held(engine.executor());
        }
    }
}

#[test]
fn a_step_beyond_the_tokens_that_were_asked_for_is_refused() {
    for settings in [&["predictor.kind=draft-query"][..], &["predictor.kind=exact"]] {
        let mut executor = executor(4, 3, 0, settings);
        let (request, bystander) = (RequestId(1), RequestId(2));
        let mut token = start(&mut executor, request, &prompt(30, 1), 3);
        let mut other = start(&mut executor, bystander, &prompt(30, 2), 30);
        for _ in 0..2 {
            token = step(&mut executor, request, token);
        }
        // 32 tokens are 8 full blocks; a ninth would have no room in the store.
        for _ in 0..6 {
            let rows = [DecodeRow { request, token }, DecodeRow { request: bystander, token: other }];
            let mut results = executor.decode(&rows).unwrap();
            other = results.remove(1).unwrap();
            let error = results.remove(0).unwrap_err().to_string();
            assert!(error.contains("no more steps than tokens were asked for"), "{error}");
        }
        executor.release(request);
        executor.release(bystander);
        assert_nothing_held(&executor);
    }
}
