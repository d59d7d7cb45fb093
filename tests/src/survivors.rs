//! Three requests of random weights whose memories and policies may fail.

use crate::drive::{Answer, Answers, assert_nothing_held, drive, request, solo};
use crate::models::parts;
use crate::synthetic::{self, VOCAB};
use oasis_core::engine::{Engine, GenerateRequest};
use oasis_core::ids::TokenId;
use oasis_core::pipeline::Tracer;
use oasis_models::cpu::{CpuExecutor, CpuOptions, Residency, SparseParts};

const BLOCK: usize = 4;

/// A prompt that depends on nothing but its arguments.
pub fn prompt(tokens: usize, seed: u32) -> Vec<TokenId> {
    (0..tokens as u32).map(|i| TokenId((i * i * (seed + 3) + 7 * i + seed) % VOCAB as u32)).collect()
}

/// Three contexts of 8 to 14 blocks that complete blocks while they decode.
pub fn requests() -> [GenerateRequest; 3] {
    [request(&prompt(33, 0), 18), request(&prompt(40, 1), 18), request(&prompt(38, 2), 14)]
}

/// K is 3 of these; three admissions a step.
pub fn default_parts(predictor: &str) -> SparseParts {
    let predictor = format!("predictor.kind={predictor}");
    parts(&synthetic::model(7), 3, BLOCK, &[&predictor, "selector.kind=fetch-all"])
}

/// An engine over the parts.
///
/// # Panics
/// When they do not fit together.
pub fn engine(parts: SparseParts) -> Engine<CpuExecutor> {
    let options = CpuOptions { block_tokens: BLOCK, prefill_chunk: 64, threads: 1, kv_memory: 0 };
    let executor = CpuExecutor::new(synthetic::model(7), Residency::Sparse(parts), options, Tracer::default());
    Engine::new(executor.unwrap(), 8)
}

/// What each request says when nothing else runs and nothing fails.
pub fn solos(predictor: &str) -> Vec<Answer> {
    requests().into_iter().map(|request| solo(&mut engine(default_parts(predictor)), request)).collect()
}

/// Runs the three requests together; gives the errors of those that failed. The others must say what they say alone,
/// nothing may be held, and the first request must still be answered when it comes again, unless `lasting`.
///
/// # Panics
/// When it is not so.
pub fn survivors(mut engine: Engine<CpuExecutor>, alone: &[Answer], lasting: bool, case: &str) -> Vec<String> {
    let ids = requests().map(|request| engine.submit(request).unwrap());
    let mut answers = Answers::new();
    drive(&mut engine, &mut answers, |_, _| {});
    let mut errors = Vec::new();
    for (index, id) in ids.iter().enumerate() {
        let (got, alone) = (&answers[id], &alone[index]);
        match &got.error {
            Some(error) => {
                assert!(!got.finished, "{case}");
                let said = got.tokens.len();
                assert_eq!(got.tokens, alone.tokens[..said], "{case}: what it said before it failed");
                errors.push(error.clone());
            }
            None => assert!(got == alone, "{case}: request {index} is disturbed"),
        }
    }
    assert_nothing_held(engine.executor());
    if !lasting {
        let again = solo(&mut engine, requests()[0].clone());
        assert!(again == alone[0], "{case}: a later request: {:?}", again.error);
    }
    errors
}
