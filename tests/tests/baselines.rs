//! What the policies of other papers ask of an executor: dense first layers, blocks that are always kept, choices that
//! are corrected and choices that are made a layer ahead.

use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, TokenId};
use oasis_core::observer::{LayerView, StepObserver};
use oasis_core::pipeline::Tracer;
use oasis_core::policy::{PredictBatch, Predictor, QuerySource, rank_by_score};
use oasis_core::sampling::SamplingParams;
use oasis_core::working_set::Ranking;
use oasis_models::cpu::{CpuExecutor, CpuModel, PromptState, Residency, SparseParts};
use oasis_tests::models::{dense, oasis_tiny, options, parts, read, sparse};
use oasis_tests::prompts::Prompts;
use std::sync::{Arc, Mutex};

const STEPS: usize = 40;

/// A prompt of 25 blocks.
fn prompt(model: &CpuModel) -> PromptState {
    read(model, &Prompts::new().prose(401, 4), 512)
}

/// Bits of the logits of every step; the tokens are forced, so that runs can be compared step by step.
fn logits(executor: &mut CpuExecutor, state: &PromptState) -> Vec<Vec<u32>> {
    let request = RequestId(1);
    executor.resume(state, request, STEPS, SamplingParams::default()).unwrap();
    let forced = Prompts::new().prose(STEPS, 5);
    let mut all = Vec::new();
    for token in forced.into_iter().take(STEPS - 1) {
        executor.decode(&[DecodeRow { request, token }]).unwrap().remove(0).unwrap();
        all.push(executor.logits(request).unwrap().iter().map(|x| x.to_bits()).collect());
    }
    executor.release(request);
    all
}

fn run(model: &Arc<CpuModel>, budget: usize, settings: &[&str]) -> (Vec<Vec<u32>>, CpuExecutor) {
    let mut executor = sparse(model, budget, settings, Tracer::default());
    (logits(&mut executor, &prompt(model)), executor)
}

/// A layer of a step, how many blocks were complete, and those of the first KV head that were resident.
type Seen = (LayerId, usize, Vec<BlockId>);

/// Notes what every layer and step attends to, beside the tail.
#[derive(Clone, Default)]
struct Residents(Arc<Mutex<Vec<Seen>>>);

impl StepObserver for Residents {
    fn layer(&mut self, view: &LayerView<'_>) {
        let resident = view.resident.unwrap();
        let complete = resident.tail.block().index();
        let blocks = resident.in_block_order(KvHead(0)).into_iter().map(|(block, _)| block).collect();
        self.0.lock().unwrap().push((view.layer, complete, blocks));
    }
}

fn residents(model: &Arc<CpuModel>, budget: usize, settings: &[&str]) -> Vec<Seen> {
    let mut executor = sparse(model, budget, settings, Tracer::default());
    let seen = Residents::default();
    executor.set_observer(Some(Box::new(seen.clone())));
    logits(&mut executor, &prompt(model));
    seen.0.lock().unwrap().clone()
}

#[test]
fn dense_layers_keep_every_block_and_the_others_k() {
    let model = oasis_tiny();
    let layers = model.spec().layers;
    for (layer, complete, blocks) in residents(&model, 4, &["kv.dense_layers=2", "predictor.kind=last-query"]) {
        match layer.index() {
            0 | 1 => assert_eq!(blocks, (0..complete).map(BlockId::from).collect::<Vec<_>>()),
            _ => assert!(blocks.len() <= 4),
        }
    }
    let (all_dense, executor) = run(&model, 1, &[&format!("kv.dense_layers={layers}")]);
    assert!(all_dense == logits(&mut dense(&model, 512), &prompt(&model)));
    assert_eq!(executor.stats().filled_entries + executor.stats().admitted_entries, 0);
}

#[test]
fn dense_layers_are_counted_as_device_memory() {
    let model = oasis_tiny();
    let footprint = |dense_layers: usize| {
        let setting = format!("kv.dense_layers={dense_layers}");
        let mut executor = sparse(&model, 4, &[&setting, "predictor.kind=last-query"], Tracer::default());
        executor.resume(&prompt(&model), RequestId(1), STEPS, SamplingParams::default()).unwrap();
        let (stats, geometry) = (executor.stats().device, executor.info().geometry);
        executor.release(RequestId(1));
        (stats, geometry)
    };
    // 401 prompt tokens and 39 that are run come to 27 blocks.
    let ((none, geometry), (two, _)) = (footprint(0), footprint(2));
    let block = geometry.block_bytes() as u64;
    assert_eq!(none.working_set, geometry.layers as u64 * (4 + 1) * block);
    assert_eq!(two.working_set - none.working_set, 2 * (27 - 4) * block);
    assert_eq!(two.summaries * 6, none.summaries * 4, "dense layers have no summaries");
}

#[test]
fn sinks_and_recent_blocks_are_resident_at_every_step() {
    let model = oasis_tiny();
    let settings = ["predictor.kind=last-query", "predictor.sinks=1", "predictor.recent=2", "selector.kind=fetch-all"];
    let seen = residents(&model, 5, &settings);
    let later: Vec<_> = seen.into_iter().filter(|(_, _, blocks)| !blocks.is_empty()).collect();
    assert!(later.len() > 6 * (STEPS - 5));
    for (layer, complete, blocks) in later {
        for block in [0, complete - 2, complete - 1] {
            assert!(blocks.contains(&BlockId::from(block)), "layer {layer}: {block} is not in {blocks:?}");
        }
    }
}

#[test]
fn streaming_llm_moves_its_window_without_the_link() {
    let model = oasis_tiny();
    let settings = ["predictor.kind=streaming-llm", "selector.kind=fetch-all"];
    for (layer, complete, blocks) in residents(&model, 5, &settings) {
        let window: Vec<BlockId> = [0].into_iter().chain(complete - 4..complete).map(BlockId::from).collect();
        assert!(blocks.is_empty() || blocks == window, "layer {layer}: {blocks:?}, {complete} blocks");
    }
    let (_, executor) = run(&model, 5, &settings);
    assert!(executor.stats().filled_entries > 0);
    assert_eq!(executor.stats().admitted_entries, 0);
}

#[test]
fn a_choice_that_is_always_corrected_is_exact_and_one_that_never_is_is_the_last_querys() {
    let model = oasis_tiny();
    let kind = |settings: &[&str]| run(&model, 5, &[settings, &["selector.kind=fetch-all"]].concat()).0;
    let exact = kind(&["predictor.kind=exact"]);
    let last = kind(&["predictor.kind=last-query"]);
    assert!(exact != last, "the two must differ, or the test tests nothing");
    assert!(kind(&["predictor.kind=freekv", "predictor.min_similarity=1"]) == exact);
    assert!(kind(&["predictor.kind=freekv", "predictor.min_similarity=-1"]) == last);
    let between = kind(&["predictor.kind=freekv", "predictor.min_similarity=0.8"]);
    assert!(between != exact && between != last);
}

/// Queries that a predictor was given, in the order of layers, step by step.
type Queries = Arc<Mutex<Vec<Vec<Vec<f32>>>>>;

struct Recorder {
    source: QuerySource,
    queries: Queries,
    scores: Vec<f32>,
}

impl Predictor for Recorder {
    fn query_source(&self) -> QuerySource {
        self.source
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        let mut queries = self.queries.lock().unwrap();
        if batch.layer.index() == 0 {
            queries.push(Vec::new());
        }
        queries.last_mut().unwrap().push(batch.requests[0].query.to_vec());
        rank_by_score(batch, Default::default(), &mut self.scores, ranking);
    }
}

/// Queries by which an executor with room for all blocks chooses.
fn queries(model: &Arc<CpuModel>, source: QuerySource) -> Vec<Vec<Vec<f32>>> {
    let queries = Queries::default();
    let predictor = Box::new(Recorder { source, queries: queries.clone(), scores: Vec::new() });
    let parts = SparseParts { predictor, ..parts(model, 100, 16, &[]) };
    let mut executor =
        CpuExecutor::new(model.clone(), Residency::Sparse(parts), options(512), Tracer::default()).unwrap();
    logits(&mut executor, &prompt(model));
    drop(executor);
    Arc::into_inner(queries).unwrap().into_inner().unwrap()
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(x, y)| x * y).sum() };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn a_layer_ahead_the_query_is_much_like_the_layers_own() {
    let model = oasis_tiny();
    let own = queries(&model, QuerySource::Exact);
    let ahead = queries(&model, QuerySource::PreviousLayer);
    assert_eq!((own.len(), ahead.len()), (STEPS - 1, STEPS - 1));
    for (own, ahead) in own.iter().zip(&ahead) {
        assert_eq!(own[0], ahead[0], "the first layer uses its own");
        for layer in 1..own.len() {
            assert_ne!(own[layer], ahead[layer]);
        }
    }
    let mean = |pick: &dyn Fn(usize, usize) -> f32| {
        let layers = 1..own[0].len();
        let all: Vec<f32> =
            (0..own.len()).flat_map(|step| layers.clone().map(move |l| (step, l))).map(|(s, l)| pick(s, l)).collect();
        all.iter().sum::<f32>() / all.len() as f32
    };
    let like = mean(&|step, layer| cosine(&own[step][layer], &ahead[step][layer]));
    let unlike = mean(&|step, layer| cosine(&own[step][layer], &own[step][layer - 1]));
    assert!(like > 0.5 && like > unlike + 0.3, "{like} with the layer's own, {unlike} with the layer before");
}

#[test]
fn random_choices_are_the_same_again() {
    let model = oasis_tiny();
    let kind = |seed: &str| run(&model, 5, &["predictor.kind=random", seed, "selector.kind=fetch-all"]).0;
    let first = kind("predictor.seed=7");
    assert!(first == kind("predictor.seed=7"));
    assert!(first != kind("predictor.seed=8"));
}

#[test]
fn no_token_is_lost_to_a_policy_of_another_paper() {
    // Contexts around the edges of blocks, and working sets of one block.
    let model = oasis_tiny();
    for settings in [
        &["predictor.kind=infinigen", "kv.dense_layers=1"][..],
        &["predictor.kind=infinigen", "selector.kind=lfu", "summarizer.kind=arkvale"],
        &["predictor.kind=freekv", "predictor.min_similarity=0.9", "kv.dense_layers=1", "summarizer.kind=quest-int4"],
        &["predictor.kind=exact", "selector.kind=adaptive-cap", "summarizer.kind=shadowkv"],
        &["predictor.kind=streaming-llm", "selector.kind=hysteresis", "summarizer.kind=quest-fp8"],
    ] {
        for (length, budget) in [(1, 1), (16, 1), (47, 2), (160, 1)] {
            let state = read(&model, &Prompts::new().prose(length, 6), 512);
            let mut executor = sparse(&model, budget, settings, Tracer::default());
            let request = RequestId(1);
            let mut token: TokenId = executor.resume(&state, request, 40, SamplingParams::default()).unwrap();
            for _ in 1..40 {
                token = executor.decode(&[DecodeRow { request, token }]).unwrap().remove(0).unwrap();
            }
            executor.release(request);
            let stats = executor.stats();
            assert_eq!((stats.device.total(), stats.store.used), (0, 0), "{settings:?}, {length}, {budget}");
        }
    }
}
