//! Policies without device code, and the copy engine, on a GPU: the host decides or carries, the tokens are the same.

use oasis_core::executor::{Admission, DecodeRow, Executor, ExecutorStats, PrefillProgress, Sequence};
use oasis_core::geometry::HeadShape;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, TokenId};
use oasis_core::observer::{LayerView, SelectionView, StepObserver};
use oasis_core::pipeline::Tracer;
use oasis_core::policy::{
    Aggregate, PredictBatch, Predictor, QuerySource, SelectBatch, Selector, Summarizer, rank_by_score,
};
use oasis_core::sampling::SamplingParams;
use oasis_core::working_set::{RankedBlock, Ranking, TransferPlan};
use oasis_cuda::device::Device;
use oasis_cuda::executor::{
    Bridge, CudaExecutor, CudaOptions, GatherOptions, HostOptions, HostParts, HostPolicies, Residency, SparseOptions,
    StepMode,
};
use oasis_cuda::measure::{EntryRates, gather_options};
use oasis_cuda::model::DeviceModel;
use oasis_example_policy as _;
use oasis_models::checkpoint::{self, Precision};
use oasis_models::cpu::{self, CpuExecutor, CpuModel, SparseParts};
use oasis_tests::models::{greedy, oasis_tiny, options, parts};
use oasis_tests::prompts::Prompts;
use std::collections::HashMap;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const BUDGET: usize = 32;
/// Tokens may differ only where two logits are closer, see [`gap`].
const CLOSE: f32 = 2e-2;

/// One test has the GPU at a time: a thread that waits for the device ends another's capture.
static TURN: Mutex<()> = Mutex::new(());

/// The GPU and the turn to use it; `None`, said aloud, where there is none.
fn device(test: &str) -> Option<(Device, MutexGuard<'static, ()>)> {
    match Device::open(0) {
        Ok(device) => Some((device, TURN.lock().unwrap_or_else(PoisonError::into_inner))),
        Err(error) => {
            // Not by `eprintln!`, which the harness keeps to itself when a test passes.
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {error}");
            None
        }
    }
}

/// Policies for the GPU, those without device code for the host.
fn on_device(policies: SparseParts, cap: usize) -> (SparseOptions, HostPolicies) {
    let SparseParts { summarizer, predictor, selector, .. } = policies;
    let checkpoint = checkpoint::open("oasis-tiny").unwrap();
    let spec = checkpoint.spec();
    let shape = HeadShape { group: spec.q_heads / spec.kv_heads, head_dim: spec.head_dim, block_tokens: 16 };
    let options = SparseOptions {
        budget_blocks: BUDGET,
        cap,
        source: predictor.query_source(),
        correction: predictor.correction(),
        ranking: predictor.by_score(),
        summarizer: summarizer.device_code(),
        summary_bytes: summarizer.device_bytes(shape),
        selector: selector.device_code(),
        follows_link: selector.cap_by_link(BUDGET, 1, None).is_some(),
        gather: GatherOptions::default(),
        copy_engine: false,
        host: HostOptions { capacity: 1 << 30, alias: None },
        draft_window: None,
        through_store: false,
        observed: false,
    };
    (options, HostPolicies { summarizer: Box::new(WithoutCode(summarizer)), predictor, selector })
}

/// A summarizer that hides its device code.
struct WithoutCode(Arc<dyn Summarizer>);

impl Summarizer for WithoutCode {
    fn rows_per_block(&self) -> usize {
        self.0.rows_per_block()
    }

    fn summarize(&self, shape: HeadShape, tasks: &mut [oasis_core::policy::SummarizeTask<'_>]) {
        self.0.summarize(shape, tasks);
    }

    fn score(&self, shape: HeadShape, aggregate: Aggregate, tasks: &mut [oasis_core::policy::ScoreTask<'_>]) {
        self.0.score(shape, aggregate, tasks);
    }
}

fn start_gpu(device: &Device, sparse: SparseOptions, policies: HostPolicies) -> CudaExecutor {
    let checkpoint = checkpoint::open("oasis-tiny").unwrap();
    let weights = checkpoint.load_weights(Precision::Auto, &mut |_| {}).unwrap();
    let spec = checkpoint.spec();
    let head = (sparse.source == QuerySource::Draft).then(|| {
        let head = checkpoint::open_head("oasis-tiny-eagle3").unwrap();
        head.load(spec, Precision::Auto, &mut |_| {}).unwrap()
    });
    let options = CudaOptions {
        residency: Residency::Sparse(Box::new(sparse)),
        max_batch: 4,
        max_context: 4096,
        memory_limit: None,
        prefill_chunk: 512,
        prefill_multiprocessors: None,
        prefill_layers: None,
        mode: StepMode::Graph,
    };
    let plan = CudaExecutor::plan(device, spec, head.as_ref().map(|head| &head.spec), &options).unwrap();
    let model = DeviceModel::upload(device, spec, &weights, head.as_ref(), options.max_context).unwrap();
    let parts = HostParts { policies: Some(policies), ..HostParts::default() };
    CudaExecutor::with_host_parts(device, model, plan, options, parts, &|_, _| ()).unwrap()
}

/// Admits a prompt and reads it; gives the first token.
fn begin(executor: &mut CudaExecutor, request: RequestId, prompt: &[TokenId], max_new_tokens: usize) -> TokenId {
    let sequence = Sequence { request, prompt: prompt.to_vec(), max_new_tokens, sampling: SamplingParams::default() };
    assert_eq!(executor.admit(sequence).unwrap(), Admission::Admitted);
    loop {
        if let PrefillProgress::Done(token) = executor.prefill(request).unwrap() {
            return token;
        }
    }
}

/// What the GPU would say after each of `forced`, all but the last.
fn follow(executor: &mut CudaExecutor, prompt: &[TokenId], forced: &[TokenId]) -> Vec<TokenId> {
    let request = RequestId(1);
    let mut said = vec![begin(executor, request, prompt, forced.len())];
    for &token in &forced[..forced.len() - 1] {
        said.push(executor.decode(&[DecodeRow { request, token }]).unwrap().remove(0).unwrap());
    }
    executor.release(request);
    said
}

/// How far the logit of `token` lies below the largest, in parts of the distance between the largest and the mean.
fn gap(logits: &[f32], token: TokenId) -> f32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mean = logits.iter().sum::<f32>() / logits.len() as f32;
    (largest - logits[token.index()]) / (largest - mean)
}

/// Runs `policies` on both executors and compares answers token by token.
fn compare(test: &str, bridge: Bridge, policies: impl Fn(&CpuModel) -> SparseParts) {
    let Some((device, _turn)) = device(test) else { return };
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let (on_cpu, cap) = (policies(&model), policies(&model).selector.cap(BUDGET));
    let residency = cpu::Residency::Sparse(on_cpu);
    let mut reference = CpuExecutor::new(model.clone(), residency, options(512), Tracer::default()).unwrap();
    let (sparse, host) = on_device(policies(&model), cap);
    assert_eq!(sparse.bridge(), Some(bridge), "{test}");
    let mut gpu = start_gpu(&device, sparse, host);
    assert!(gpu.info().device.contains("on the host"), "{}", gpu.info().device);
    let (mut places, mut different) = (0, 0);
    for (which, key) in [10_586, 46_475, 79_013, 36_721, 91_852, 24_694, 58_137, 63_320].into_iter().enumerate() {
        let prompt = prompts.passkey(key, 330 + 61 * which, 4 * which);
        let (mut expected, logits) = greedy(&mut reference, &prompt, 24);
        let end = expected.iter().position(|token| *token == prompts.stop()).map_or(expected.len(), |at| at + 1);
        expected.truncate(end);
        let said = follow(&mut gpu, &prompt, &expected);
        places += end;
        for (at, ((expected, said), logits)) in expected.iter().zip(&said).zip(&logits).enumerate() {
            let gap = gap(logits, *said);
            different += usize::from(said != expected);
            let what = format!("{test}, {} prompt tokens, token {at}: {said} for {expected}, gap {gap}", prompt.len());
            assert!(gap < CLOSE, "{what}");
        }
    }
    let stats = gpu.stats();
    println!("{test}: {different} of {places} tokens differ, {} entries admitted", stats.admitted_entries);
    assert!(stats.admitted_entries > 0 && stats.admitted_entries <= stats.cap_entries, "{stats:?}");
}

#[test]
fn a_selector_without_device_code_decodes_as_on_the_cpu() {
    for predictor in ["draft-query", "last-query", "exact"] {
        let settings = [&format!("predictor.kind={predictor}"), "selector.kind=top-only", "selector.top=24"];
        compare(predictor, Bridge::Selection, |model| parts(model, BUDGET, 16, &settings));
    }
}

/// The first block is always wanted.
struct Sink {
    source: QuerySource,
    scores: Vec<f32>,
}

impl Predictor for Sink {
    fn query_source(&self) -> QuerySource {
        self.source
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        rank_by_score(batch, Aggregate::Max, &mut self.scores, ranking);
        let kv_heads = ranking.kv_heads();
        for (index, head) in (0..batch.requests.len() * kv_heads).map(|i| (i / kv_heads, KvHead::from(i % kv_heads))) {
            let mut ranked = ranking.head(index, head).to_vec();
            let (sink, last) = (BlockId(0), ranked.len().saturating_sub(1));
            if !ranked.is_empty() && !ranking.wanted(index, head).contains(sink) {
                ranked[last] = RankedBlock { block: sink, score: f32::INFINITY };
                ranking.set(index, head, ranked);
            }
        }
    }
}

#[test]
fn a_predictor_with_a_sink_decodes_as_on_the_cpu() {
    for source in [QuerySource::Draft, QuerySource::Current, QuerySource::Exact] {
        compare(&format!("sink, {source:?}"), Bridge::Prediction, |model| SparseParts {
            predictor: Box::new(Sink { source, scores: Vec::new() }),
            ..parts(model, BUDGET, 16, &["selector.fetch_ratio=0.1"])
        });
    }
}

#[test]
fn a_summarizer_without_device_code_decodes_as_on_the_cpu() {
    let policies = |model: &CpuModel| parts(model, BUDGET, 16, &["predictor.kind=last-query"]);
    compare("quest without device code", Bridge::Prediction, |model| SparseParts {
        summarizer: Arc::new(WithoutCode(policies(model).summarizer)),
        ..policies(model)
    });
}

/// The usual ranking, by a predictor that does not say so.
struct Silent(Vec<f32>);

impl Predictor for Silent {
    fn query_source(&self) -> QuerySource {
        QuerySource::Draft
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        rank_by_score(batch, Aggregate::Sum, &mut self.0, ranking);
    }
}

/// Sums in another order may rank nearly equal scores otherwise.
fn assert_few_differ(said: &[TokenId], expected: &[TokenId]) {
    let different = said.iter().zip(expected).filter(|(said, expected)| said != expected).count();
    println!("{different} of {} tokens differ", expected.len());
    assert!(said.len() == expected.len() && different * 20 <= expected.len(), "{said:?}, {expected:?}");
}

#[test]
fn a_prediction_on_the_host_chooses_what_the_device_chooses() {
    let Some((device, _turn)) = device("a prediction on the host beside the device's") else { return };
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let policies = || parts(&model, BUDGET, 16, &["selector.fetch_ratio=0.1"]);
    let silent = SparseParts { predictor: Box::new(Silent(Vec::new())), ..policies() };
    let [mut alone, mut bridged] = [policies(), silent].map(|policies| {
        let (sparse, host) = on_device(policies, 3);
        start_gpu(&device, sparse, host)
    });
    // Longer than the working set, about as long, and shorter than a block.
    for (length, which, tokens) in [(1500, 0, 70), (505, 1, 40), (9, 2, 60)] {
        let (prompt, request) = (prompts.prose(length, which), RequestId(0));
        let mut expected = vec![begin(&mut alone, request, &prompt, tokens)];
        while expected.len() < tokens {
            let token = *expected.last().unwrap();
            expected.push(alone.decode(&[DecodeRow { request, token }]).unwrap().remove(0).unwrap());
        }
        alone.release(request);
        assert_few_differ(&follow(&mut bridged, &prompt, &expected), &expected);
    }
    let (expected, _) = batch(&mut alone, &prompts, None);
    for (said, expected) in batch(&mut bridged, &prompts, Some(&expected)).0.iter().zip(&expected) {
        assert_few_differ(said, expected);
    }
    let (alone, bridged) = (alone.stats(), bridged.stats());
    println!("admitted {} and {}", alone.admitted_entries, bridged.admitted_entries);
    assert_eq!(bridged.filled_entries, alone.filled_entries);
    assert!(bridged.admitted_entries.abs_diff(alone.admitted_entries) * 50 <= alone.admitted_entries);
}

/// What three requests that decode together say, along given tokens or their own, and what it took.
fn batch(
    gpu: &mut CudaExecutor,
    prompts: &Prompts,
    along: Option<&[Vec<TokenId>]>,
) -> (Vec<Vec<TokenId>>, ExecutorStats) {
    const TOKENS: usize = 60;
    let lengths = [1500, 9, 700];
    let mut said: Vec<Vec<TokenId>> = Vec::new();
    for step in 0..TOKENS {
        // They begin one after the other, so that first steps fall between the others' transfers.
        if step % 10 == 0 && said.len() < lengths.len() {
            let (index, prompt) = (said.len(), prompts.prose(lengths[said.len()], said.len()));
            said.push(vec![begin(gpu, RequestId(index as u64), &prompt, TOKENS + 1)]);
        }
        let rows: Vec<DecodeRow> = (said.iter().enumerate())
            .map(|(index, said)| {
                let token = along.map_or(said, |along| &along[index])[said.len() - 1];
                DecodeRow { request: RequestId(index as u64), token }
            })
            .collect();
        for (said, token) in said.iter_mut().zip(gpu.decode(&rows).unwrap()) {
            said.push(token.unwrap());
        }
    }
    let stats = gpu.stats();
    (0..said.len()).for_each(|index| gpu.release(RequestId(index as u64)));
    (said, stats)
}

#[test]
fn the_bridge_and_the_copy_engine_do_what_the_device_does_alone() {
    let Some((device, _turn)) = device("the bridge and the copy engine beside the device") else { return };
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let run = |predictor: &str, bridged: bool, copy_engine: bool| {
        let settings = [&format!("predictor.kind={predictor}"), "selector.fetch_ratio=0.1"];
        let (sparse, policies) = on_device(parts(&model, BUDGET, 16, &settings), 3);
        assert_eq!(sparse.bridge(), None);
        let selector = sparse.selector.filter(|_| !bridged);
        let sparse = SparseOptions { selector, copy_engine, ..sparse };
        batch(&mut start_gpu(&device, sparse, policies), &prompts, None)
    };
    for predictor in ["draft-query", "exact"] {
        let (expected, alone) = run(predictor, false, false);
        assert!(alone.admitted_entries > 0 && alone.deferred_entries > 0, "{alone:?}");
        for (bridged, copy_engine) in [(true, false), (false, true), (true, true)] {
            let (said, stats) = run(predictor, bridged, copy_engine);
            let case = format!("{predictor}, bridged {bridged}, copy engine {copy_engine}");
            assert_eq!(said, expected, "{case}");
            let counters = |s: &ExecutorStats| (s.filled_entries, s.admitted_entries, s.deferred_entries, s.link_bytes);
            assert_eq!(counters(&stats), counters(&alone), "{case}");
        }
    }
    // These the host does not run.
    for predictor in ["freekv", "infinigen"] {
        let (expected, alone) = run(predictor, false, false);
        let (said, stats) = run(predictor, false, true);
        assert_eq!(said, expected, "{predictor}");
        assert_eq!(stats.admitted_entries, alone.admitted_entries, "{predictor}");
    }
}

/// Keys that were seen, as bits, `[blocks]` of each request, layer and KV head.
type SeenKeys = HashMap<(RequestId, LayerId, KvHead), Vec<Vec<u32>>>;

/// What an observer saw.
#[derive(Default)]
struct Seen {
    /// Position of the last view of each request and layer.
    positions: HashMap<(RequestId, LayerId), usize>,
    views: usize,
    keys: SeenKeys,
    admitted: usize,
    deferred: usize,
    selections: usize,
    released: Vec<RequestId>,
}

/// Compares views with each other.
struct Audit {
    head_dim: usize,
    seen: Arc<Mutex<Seen>>,
}

impl StepObserver for Audit {
    fn layer(&mut self, view: &LayerView<'_>) {
        let seen = &mut *self.seen.lock().unwrap();
        let before = seen.positions.insert((view.request, view.layer), view.position);
        assert!(before.is_none_or(|before| before + 1 == view.position), "{before:?}, {}", view.position);
        let (complete, is_first) = (view.position / 16, before.is_none());
        assert_eq!(view.summaries.blocks(), complete);
        assert!(view.has_draft && view.queries.iter().all(|x| x.is_finite()) && view.queries.iter().any(|x| *x != 0.0));
        for head in (0..view.set.kv_heads()).map(KvHead::from) {
            let held = view.set.head(head).residents();
            let resident = (0..complete).filter(|block| held.contains(BlockId::from(*block))).count();
            assert_eq!(resident, if is_first { 0 } else { complete.min(BUDGET) });
            // A block never changes, whether it lies in the tail or in the full KV; the tail grows.
            let keys: Vec<Vec<u32>> =
                view.keys.of_head(head).iter().map(|keys| keys.iter().map(|x| x.to_bits()).collect()).collect();
            assert_eq!(keys.len(), complete + 1);
            assert!(keys[..complete].iter().all(|keys| keys.len() == 16 * self.head_dim));
            assert_eq!(keys[complete].len(), view.position % 16 * self.head_dim);
            let place = (view.request, view.layer, head);
            for (before, now) in seen.keys.get(&place).into_iter().flatten().zip(&keys) {
                assert!(now.starts_with(before), "{place:?}, {}: a key has changed", view.position);
            }
            seen.keys.insert(place, keys);
        }
        seen.views += 1;
    }

    fn selected(&mut self, view: &SelectionView<'_>) {
        let seen = &mut *self.seen.lock().unwrap();
        for (index, member) in view.members.iter().enumerate() {
            assert!(!member.failed);
            assert_eq!(view.ranking.head(index, KvHead(0)).len(), member.blocks.min(BUDGET));
            seen.admitted += member.admitted;
            seen.deferred += member.deferred;
            seen.selections += 1;
        }
    }

    fn release(&mut self, request: RequestId) {
        self.seen.lock().unwrap().released.push(request);
    }
}

#[test]
fn an_observer_changes_nothing_and_sees_every_layer_of_every_request() {
    let Some((device, _turn)) = device("an observer of decode steps") else { return };
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let start = |observed: bool| {
        let (sparse, policies) = on_device(parts(&model, BUDGET, 16, &["selector.fetch_ratio=0.1"]), 3);
        start_gpu(&device, SparseOptions { observed, ..sparse }, policies)
    };
    let seen = Arc::new(Mutex::new(Seen::default()));
    let audit = || Box::new(Audit { head_dim: model.spec().head_dim, seen: seen.clone() });
    let error = start(false).set_observer(Some(audit())).unwrap_err().to_string();
    assert!(error.contains("expected an executor whose policies the host runs, found"), "{error}");

    let (expected, alone) = batch(&mut start(true), &prompts, None);
    let mut gpu = start(true);
    gpu.set_observer(Some(audit())).unwrap();
    let (said, stats) = batch(&mut gpu, &prompts, None);
    assert_eq!(said, expected);
    let counters = |s: &ExecutorStats| (s.filled_entries, s.admitted_entries, s.deferred_entries, s.link_bytes);
    assert_eq!(counters(&stats), counters(&alone));
    let seen = seen.lock().unwrap();
    let layers = gpu.info().geometry.layers;
    assert_eq!((seen.views, seen.selections), (stats.tokens as usize * layers, stats.tokens as usize * layers));
    assert_eq!((seen.admitted as u64, seen.deferred as u64), (stats.admitted_entries, stats.deferred_entries));
    assert_eq!(seen.released, [RequestId(0), RequestId(1), RequestId(2)]);
    assert!(seen.admitted > 0 && seen.deferred > 0);
}

/// Breaks its contract when a request of the batch has many blocks.
struct Greedy;

impl Selector for Greedy {
    fn cap(&self, _budget: usize) -> usize {
        1
    }

    fn plan(&mut self, batch: &SelectBatch<'_>, _plan: &mut TransferPlan) {
        let blocks = |index| batch.want.head(index, KvHead(0)).len();
        assert!((0..batch.requests.len()).all(|index| blocks(index) < BUDGET), "too long for me");
    }
}

#[test]
fn a_selector_that_panics_ends_its_request_and_not_the_executor() {
    let Some((device, _turn)) = device("a selector that panics") else { return };
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let policies =
        SparseParts { selector: Box::new(Greedy), ..parts(&model, BUDGET, 16, &["predictor.kind=last-query"]) };
    let (sparse, policies) = on_device(policies, 1);
    let mut gpu = start_gpu(&device, sparse, policies);
    let request = RequestId(7);
    let token = begin(&mut gpu, request, &prompts.prose(900, 0), 8);
    let error = gpu.decode(&[DecodeRow { request, token }]).unwrap().remove(0).unwrap_err().to_string();
    assert!(error.contains("request 7: the select stage panicked: too long for me"), "{error}");
    let again = gpu.decode(&[DecodeRow { request, token }]).unwrap().remove(0).unwrap_err().to_string();
    assert_eq!(again, error);
    gpu.release(request);
    let short = RequestId(8);
    let token = begin(&mut gpu, short, &prompts.prose(200, 1), 8);
    gpu.decode(&[DecodeRow { request: short, token }]).unwrap().remove(0).unwrap();
}

#[test]
fn entries_cross_the_link_faster_by_the_gather_than_by_copies() {
    let Some((device, _turn)) = device("rates of entries") else { return };
    let gather = gather_options(&device, 128, None, None).unwrap();
    // What was measured is remembered.
    assert_eq!(gather_options(&device, 128, None, None).unwrap(), gather);
    let rates = EntryRates::measure(&device, 128, gather).unwrap();
    println!("{gather:?}, {rates:?}");
    assert!(rates.copy_engine > 0.0 && rates.gather > rates.copy_engine, "{rates:?}");
    assert!(rates.copy_engine_batch.is_none_or(|rate| rates.gather > rate), "{rates:?}");
    assert_eq!(
        gather_options(&device, 128, Some(5), Some(6)).unwrap(),
        GatherOptions { ctas: 5, stages: 6, stores: 3 }
    );
}
