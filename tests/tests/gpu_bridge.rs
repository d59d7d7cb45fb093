//! Policies without device code, and the copy engine, on a GPU: the host decides or carries, the tokens are the same.

use oasis_core::executor::{Admission, DecodeRow, Executor, ExecutorStats, PrefillProgress, Sequence};
use oasis_core::geometry::HeadShape;
use oasis_core::ids::{BlockId, KvHead, RequestId, TokenId};
use oasis_core::pipeline::Tracer;
use oasis_core::policy::{
    Aggregate, PredictBatch, Predictor, QuerySource, SelectBatch, Selector, Summarizer, rank_by_score,
};
use oasis_core::sampling::SamplingParams;
use oasis_core::testkit::doubles::FirstKey;
use oasis_core::working_set::{RankedBlock, Ranking, TransferPlan};
use oasis_cuda::compile::SourceFile;
use oasis_cuda::device::Device;
use oasis_cuda::executor::{
    Bridge, CudaExecutor, CudaOptions, GatherOptions, HostOptions, HostPolicies, Residency, SparseOptions, StepMode,
};
use oasis_cuda::measure::{EntryRates, gather_options};
use oasis_cuda::model::DeviceModel;
use oasis_example_policy as _;
use oasis_models::checkpoint::{self, Precision};
use oasis_models::cpu::{self, CpuExecutor, CpuModel, SparseParts};
use oasis_tests::models::{greedy, oasis_tiny, options, parts};
use oasis_tests::prompts::Prompts;
use std::sync::Arc;

const BUDGET: usize = 32;
/// Logits of the two executors differ by less; only tokens whose logits are closer may be exchanged.
const CLOSE: f32 = 2e-2;

/// The GPU; `None`, said aloud, where there is none.
fn device(test: &str) -> Option<Device> {
    let device = Device::open(0);
    if let Err(error) = &device {
        eprintln!("SKIPPED {test}: {error}");
    }
    device.ok()
}

/// Policies for the GPU, those without device code for the host.
fn on_device(policies: SparseParts, cap: usize) -> (SparseOptions, HostPolicies) {
    let SparseParts { summarizer, predictor, selector, .. } = policies;
    let code = |code: Option<oasis_core::policy::DeviceCode>| code.map(|c| SourceFile { name: c.name, text: c.source });
    let options = SparseOptions {
        budget_blocks: BUDGET,
        cap,
        source: predictor.query_source(),
        aggregate: predictor.by_score(),
        summarizer: code(summarizer.device_code()),
        summary_rows: summarizer.rows_per_block(),
        selector: code(selector.device_code()),
        gather: GatherOptions::default(),
        copy_engine: false,
        host: HostOptions { capacity: 1 << 30, alias: None },
    };
    (options, HostPolicies { summarizer: Box::new(Shared(summarizer)), predictor, selector })
}

/// A summarizer that an `Arc` holds.
struct Shared(Arc<dyn Summarizer>);

impl Summarizer for Shared {
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
        residency: Residency::Sparse(sparse),
        max_batch: 4,
        max_context: 4096,
        memory_limit: None,
        prefill_chunk: 512,
        prefill_layers: None,
        mode: StepMode::Graph,
    };
    let plan = CudaExecutor::plan(device, spec, head.as_ref().map(|head| &head.spec), &options).unwrap();
    let model = DeviceModel::upload(device, spec, &weights, head.as_ref(), options.max_context).unwrap();
    CudaExecutor::with_policies(device, model, plan, options, Some(policies), &|_, _| ()).unwrap()
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

/// Runs `policies` on both executors and compares token by token.
fn compare(test: &str, bridge: Bridge, policies: impl Fn(&CpuModel) -> SparseParts) {
    let Some(device) = device(test) else { return };
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let (on_cpu, cap) = (policies(&model), policies(&model).selector.cap(BUDGET));
    let residency = cpu::Residency::Sparse(on_cpu);
    let mut reference = CpuExecutor::new(model.clone(), residency, options(512), Tracer::default()).unwrap();
    let (sparse, host) = on_device(policies(&model), cap);
    assert_eq!(sparse.bridge(), Some(bridge), "{test}");
    let mut gpu = start_gpu(&device, sparse, host);
    assert!(gpu.info().device.contains("on the host"), "{}", gpu.info().device);
    // Longer than the working set, about as long, and shorter than a block.
    for (prompt, tokens) in [(prompts.prose(1500, 0), 70), (prompts.prose(505, 1), 40), (prompts.prose(9, 2), 24)] {
        let (expected, logits) = greedy(&mut reference, &prompt, tokens);
        let said = follow(&mut gpu, &prompt, &expected);
        for (at, ((expected, said), logits)) in expected.iter().zip(&said).zip(&logits).enumerate() {
            let gap = logits[expected.index()] - logits[said.index()];
            assert!(
                gap < CLOSE,
                "{test}, {} prompt tokens, token {at}: {said} for {expected}, gap {gap}",
                prompt.len()
            );
        }
    }
    let (cpu, gpu) = (reference.stats(), gpu.stats());
    println!("{test}: admitted {} on the CPU, {} on the GPU", cpu.admitted_entries, gpu.admitted_entries);
    assert!(gpu.admitted_entries > 0 && gpu.admitted_entries <= gpu.cap_entries, "{gpu:?}");
    // Scores that are nearly equal may rank otherwise.
    let difference = cpu.admitted_entries.abs_diff(gpu.admitted_entries);
    assert!(difference * 20 <= cpu.admitted_entries, "{test}: {cpu:?}, {gpu:?}");
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
    compare("first key", Bridge::Prediction, |model| SparseParts {
        summarizer: Arc::new(FirstKey),
        ..parts(model, BUDGET, 16, &["predictor.kind=last-query", "selector.fetch_ratio=0.1"])
    });
}

/// Tokens of three requests that decode together, and what it took.
fn batch(gpu: &mut CudaExecutor, prompts: &Prompts) -> (Vec<Vec<TokenId>>, ExecutorStats) {
    const TOKENS: usize = 60;
    let lengths = [1500, 700, 1111];
    let mut said: Vec<Vec<TokenId>> = Vec::new();
    for step in 0..TOKENS {
        // They begin one after the other, so that first steps fall between the others' transfers.
        if step % 10 == 0 && said.len() < lengths.len() {
            let (index, prompt) = (said.len(), prompts.prose(lengths[said.len()], said.len()));
            said.push(vec![begin(gpu, RequestId(index as u64), &prompt, TOKENS + 1)]);
        }
        let rows: Vec<DecodeRow> = (said.iter().enumerate())
            .map(|(index, said)| DecodeRow { request: RequestId(index as u64), token: *said.last().unwrap() })
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
    let Some(device) = device("the bridge and the copy engine beside the device") else { return };
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let run = |predictor: &str, bridged: bool, copy_engine: bool| {
        let settings = [&format!("predictor.kind={predictor}"), "selector.fetch_ratio=0.1"];
        let (sparse, policies) = on_device(parts(&model, BUDGET, 16, &settings), 3);
        assert_eq!(sparse.bridge(), None);
        let selector = sparse.selector.filter(|_| !bridged);
        let sparse = SparseOptions { selector, copy_engine, ..sparse };
        batch(&mut start_gpu(&device, sparse, policies), &prompts)
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
    let Some(device) = device("a selector that panics") else { return };
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
    let Some(device) = device("rates of entries") else { return };
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
