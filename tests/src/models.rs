//! Models and executors for tests.

use oasis_core::config::{Layer, Resolved};
use oasis_core::executor::{DecodeRow, Executor, PrefillProgress, Sequence};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::pipeline::Tracer;
use oasis_core::sampling::SamplingParams;
use oasis_models::checkpoint::{self, Precision};
use oasis_models::cpu::{CpuExecutor, CpuModel, CpuOptions, PromptState, Residency, SparseParts};
use std::sync::Arc;

/// Loads a model and, where one is named, its draft head.
///
/// # Panics
/// When either cannot be loaded.
pub fn load(model: &str, draft: Option<&str>) -> Arc<CpuModel> {
    let checkpoint = checkpoint::open(model).unwrap();
    let weights = checkpoint.load_weights(Precision::Auto, &mut |_| {}).unwrap();
    let spec = checkpoint.spec().clone();
    let head = draft.map(|draft| {
        let head = checkpoint::open_head(draft).unwrap();
        Arc::new(head.load(&spec, Precision::Auto, &mut |_| {}).unwrap())
    });
    Arc::new(CpuModel::new(spec, weights, head))
}

/// The embedded model with its head.
pub fn oasis_tiny() -> Arc<CpuModel> {
    load("oasis-tiny", Some("oasis-tiny-eagle3"))
}

/// Sizes that most tests use.
pub fn options(prefill_chunk: usize) -> CpuOptions {
    CpuOptions { block_tokens: 16, prefill_chunk, threads: 0, kv_memory: 0 }
}

/// A prompt that has been read, to be resumed by several executors.
pub fn read(model: &CpuModel, prompt: &[TokenId], prefill_chunk: usize) -> PromptState {
    PromptState::read(model, prompt, prefill_chunk, &mut |_, _| ())
}

/// A dense executor.
pub fn dense(model: &Arc<CpuModel>, prefill_chunk: usize) -> CpuExecutor {
    CpuExecutor::new(model.clone(), Residency::Dense, options(prefill_chunk), Tracer::default()).unwrap()
}

/// The parts of sparse decoding, policies and memories from `key=value` settings over the defaults.
///
/// # Panics
/// When a setting is wrong.
pub fn parts(model: &CpuModel, budget_blocks: usize, block_tokens: usize, settings: &[&str]) -> SparseParts {
    let layers: Vec<Layer> = settings.iter().map(|s| Layer::assignment("--set", s).unwrap()).collect();
    let config = Resolved::new(&layers).unwrap().config;
    let spec = model.spec();
    let shape =
        oasis_core::geometry::HeadShape { group: spec.q_heads / spec.kv_heads, head_dim: spec.head_dim, block_tokens };
    SparseParts {
        budget_blocks,
        dense_layers: config.kv.dense_layers,
        draft_window: config.kv.draft_window(),
        summarizer: Arc::from(config.summarizer.build(shape).unwrap()),
        predictor: config.predictor.build().unwrap(),
        selector: config.selector.build().unwrap(),
        transport: config.transport.build().unwrap(),
        store: config.store.build().unwrap(),
    }
}

/// A sparse executor of blocks of 16 tokens; see [`parts`].
///
/// # Panics
/// When a setting is wrong.
pub fn sparse(model: &Arc<CpuModel>, budget_blocks: usize, settings: &[&str], tracer: Tracer) -> CpuExecutor {
    let parts = parts(model, budget_blocks, 16, settings);
    CpuExecutor::new(model.clone(), Residency::Sparse(parts), options(512), tracer).unwrap()
}

/// Admits a prompt and reads it; gives the first token.
pub fn start(executor: &mut impl Executor, request: RequestId, prompt: &[TokenId], max_new_tokens: usize) -> TokenId {
    let sequence = Sequence { request, prompt: prompt.to_vec(), max_new_tokens, sampling: SamplingParams::default() };
    assert_eq!(executor.admit(sequence).unwrap(), oasis_core::executor::Admission::Admitted);
    loop {
        if let PrefillProgress::Done(token) = executor.prefill(request).unwrap() {
            return token;
        }
    }
}

/// One decode step of one request.
pub fn step(executor: &mut impl Executor, request: RequestId, token: TokenId) -> TokenId {
    executor.decode(&[DecodeRow { request, token }]).unwrap().remove(0).unwrap()
}

/// Greedy tokens of a prompt, with the logits behind each.
pub fn greedy(executor: &mut CpuExecutor, prompt: &[TokenId], tokens: usize) -> (Vec<TokenId>, Vec<Vec<f32>>) {
    let request = RequestId(1);
    let mut token = start(executor, request, prompt, tokens);
    let (mut out, mut logits) = (vec![token], vec![executor.logits(request).unwrap().to_vec()]);
    while out.len() < tokens {
        token = step(executor, request, token);
        out.push(token);
        logits.push(executor.logits(request).unwrap().to_vec());
    }
    executor.release(request);
    (out, logits)
}
