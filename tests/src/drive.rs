//! Requests through an engine, with everything they said.

use oasis_core::engine::{Engine, Event, GenerateRequest};
use oasis_core::executor::Executor;
use oasis_core::geometry::KvFootprint;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::CpuExecutor;
use std::collections::{BTreeMap, BTreeSet};

/// What became of one request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// Generated tokens.
    pub tokens: Vec<TokenId>,
    /// Bits of the logits after each engine step in which the request went on decoding.
    pub logits: Vec<Vec<u32>>,
    /// It got all its tokens.
    pub finished: bool,
    /// Why it failed.
    pub error: Option<String>,
}

/// Answers by request.
pub type Answers = BTreeMap<RequestId, Answer>;

/// A greedy request that no stop token ends.
pub fn request(prompt: &[TokenId], max_new_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt.to_vec(),
        max_new_tokens,
        stop_tokens: Vec::new(),
        sampling: SamplingParams::default(),
    }
}

/// One engine step; notes what it said.
///
/// # Panics
/// When the device is lost.
pub fn step(engine: &mut Engine<CpuExecutor>, answers: &mut Answers) {
    let mut decoded = BTreeSet::new();
    for event in engine.step().expect("the CPU is not lost") {
        match event {
            Event::Prefill { .. } => {}
            Event::Token { request, token } => {
                answers.entry(request).or_default().tokens.push(token);
                decoded.insert(request);
            }
            Event::Finished { request, .. } => answers.entry(request).or_default().finished = true,
            Event::Refused { request, reason: error } | Event::Failed { request, error } => {
                answers.entry(request).or_default().error = Some(error);
            }
        }
    }
    for request in decoded {
        if let Some(logits) = engine.executor().logits(request) {
            let bits = logits.iter().map(|x| x.to_bits()).collect();
            answers.entry(request).or_default().logits.push(bits);
        }
    }
}

/// Steps until nothing waits or runs; `before` is called before each step with its number.
///
/// # Panics
/// When the device is lost, or the engine does not come to rest.
pub fn drive(
    engine: &mut Engine<CpuExecutor>,
    answers: &mut Answers,
    mut before: impl FnMut(&mut Engine<CpuExecutor>, usize),
) {
    for number in 0.. {
        assert!(number < 100_000, "the engine does not come to rest");
        before(engine, number);
        if engine.is_idle() {
            return;
        }
        step(engine, answers);
    }
}

/// The request's answer when nothing else runs.
///
/// # Panics
/// When the request is not taken.
pub fn solo(engine: &mut Engine<CpuExecutor>, request: GenerateRequest) -> Answer {
    let mut answers = Answers::new();
    let id = engine.submit(request).expect("the request can run");
    drive(engine, &mut answers, |_, _| {});
    answers.remove(&id).expect("a request that ran said something")
}

/// Checks that no request holds anything: no device memory, no store block, no task.
///
/// # Panics
/// When something is held.
pub fn assert_nothing_held(executor: &CpuExecutor) {
    let stats = executor.stats();
    assert_eq!(stats.device, KvFootprint::default(), "device memory is held");
    let store = stats.store;
    assert_eq!((store.reserved, store.used, store.requests), (0, 0, 0), "the store holds something");
    let pipeline = stats.pipeline.unwrap_or_default();
    let stages = [pipeline.predict, pipeline.select, pipeline.transfer];
    assert_eq!(stages.map(|stage| stage.queued), [0; 3], "a task is queued");
}
