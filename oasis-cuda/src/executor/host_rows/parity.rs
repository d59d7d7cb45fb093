//! The host's rows beside the CPU executor: the same queries and keys give the same views and selections.

use super::*;
use oasis_core::config::{Layer, Resolved};
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::TokenId;
use oasis_core::memory::{EntryKey, KvStore};
use oasis_core::observer::{LayerView, SelectionMember};
use oasis_core::pipeline::Tracer;
use oasis_core::sampling::SamplingParams;
use oasis_models::checkpoint::{self, Precision};
use oasis_models::cpu::{CpuExecutor, CpuModel, CpuOptions, PromptState, Residency, SparseParts};
use oasis_policies as _;
use oasis_transport as _;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

const REQUEST: RequestId = RequestId(7);
const BUDGET: usize = 8;
const PROMPT: usize = 300;
const STEPS: usize = 40;

/// A layer as an observer sees it: position, queries, whether there is a draft row, summaries, working set.
type View = (usize, Vec<f32>, bool, Vec<u32>, WorkingSet);

#[derive(Default)]
struct Seen {
    views: HashMap<(LayerId, Step), View>,
    selections: HashMap<(LayerId, Step), (Ranking, Vec<SelectionMember>)>,
}

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Seen>>);

impl StepObserver for Notes {
    fn layer(&mut self, view: &LayerView<'_>) {
        let words = view.summaries.words(view.set.kv_heads());
        let noted = (view.position, view.queries.to_vec(), view.has_draft, words, view.set.clone());
        self.0.lock().unwrap().views.insert((view.layer, view.step), noted);
    }

    fn selected(&mut self, view: &SelectionView<'_>) {
        let noted = (view.ranking.clone(), view.members.to_vec());
        self.0.lock().unwrap().selections.insert((view.layer, view.step), noted);
    }
}

/// Keys in a store, in 32-bit floats.
struct Stored {
    geometry: KvGeometry,
    store: Arc<dyn KvStore>,
    runtime: tokio::runtime::Runtime,
}

impl BlockKeys for Stored {
    fn append(&self, of: &KeysOf<'_>, head: KvHead, block: BlockId, keys: &mut Vec<f32>) {
        let Member { position, .. } = of.member;
        assert!((block.index() + 1) * self.geometry.block_tokens <= position + 1, "{block:?} at {position}");
        let key = EntryKey { request: REQUEST, layer: of.layer, block, head };
        let entry = self.runtime.block_on(self.store.fetch(&[key])).unwrap().entries.remove(0);
        let floats = entry.bytes().chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap()));
        keys.extend(floats.take(self.geometry.block_tokens * self.geometry.head_dim));
    }
}

fn config(settings: &[&str]) -> oasis_core::config::Config {
    let layers: Vec<Layer> = settings.iter().map(|s| Layer::assignment("test", s).unwrap()).collect();
    Resolved::new(&layers).unwrap().config
}

fn compare(model: &Arc<CpuModel>, state: &PromptState, settings: &[&str]) -> usize {
    let config = config(settings);
    let spec = model.spec();
    let shape = crate::executor::plan::geometry(spec).head_shape();
    let store = config.store.build().unwrap();
    let parts = SparseParts {
        budget_blocks: BUDGET,
        dense_layers: 0,
        draft_window: None,
        summarizer: config.summarizer.build(shape).unwrap().into(),
        predictor: config.predictor.build().unwrap(),
        selector: config.selector.build().unwrap(),
        transport: config.transport.build().unwrap(),
        store: store.clone(),
    };
    let options = CpuOptions { block_tokens: shape.block_tokens, prefill_chunk: 512, threads: 0, kv_memory: 0 };
    let mut cpu = CpuExecutor::new(model.clone(), Residency::Sparse(parts), options, Tracer::default()).unwrap();
    let (geometry, cap) = (cpu.info().geometry, cpu.info().cap);
    let on_cpu = Notes::default();
    cpu.set_observer(Some(Box::new(on_cpu.clone())));
    cpu.resume(state, REQUEST, STEPS + 1, SamplingParams::default()).unwrap();
    for step in 0..STEPS {
        let rows = [DecodeRow { request: REQUEST, token: TokenId((step * 31 % spec.vocab) as u32) }];
        cpu.decode(&rows).unwrap().remove(0).unwrap();
    }

    let queries = if config.predictor.build().unwrap().query_source() == QuerySource::Draft { 2 } else { 1 };
    let policies = HostPolicies {
        summarizer: config.summarizer.build(shape).unwrap(),
        predictor: config.predictor.build().unwrap(),
        selector: config.selector.build().unwrap(),
    };
    let extent = Extent { blocks: 100, tiles: 7, slots: BUDGET, queries, draft_blocks: 100 };
    let mut rows = HostRows::new(policies, Bridge::Prediction, (cap, Kept::default()), (geometry, extent, 1));
    let on_host = Notes::default();
    rows.set_observer(Some(Box::new(on_host.clone())));
    rows.admit(0, REQUEST, Address::NONE, 0);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let keys = Stored { geometry, store, runtime };
    for step in 0..STEPS {
        rows.begin(step == 0, [(0, PROMPT + step)]);
        for layer in (0..geometry.layers).map(LayerId::from) {
            let queries = on_cpu.0.lock().unwrap().views[&(layer, Step(step as u64 + 1))].1.clone();
            rows.decide(layer, &Facts::Queries { queries: &queries, keys: &keys }, None).unwrap();
        }
    }
    // The last selections are collected, and the store's keys have been read.
    cpu.release(REQUEST);

    let (on_cpu, on_host) = (on_cpu.0.lock().unwrap(), on_host.0.lock().unwrap());
    assert_eq!((on_cpu.views.len(), on_host.views.len()), (STEPS * geometry.layers, STEPS * geometry.layers));
    for (place, expected) in &on_cpu.views {
        assert!(on_host.views[place] == *expected, "{settings:?}: another view of {place:?}");
    }
    assert_eq!(on_cpu.selections.len(), on_host.selections.len());
    for (place, expected) in &on_cpu.selections {
        assert!(on_host.selections[place] == *expected, "{settings:?}: another selection of {place:?}");
    }
    on_host.selections.values().flat_map(|(_, members)| members).map(|member| member.admitted).sum()
}

#[test]
fn an_observer_sees_what_it_sees_on_the_cpu() {
    let checkpoint = checkpoint::open("oasis-tiny").unwrap();
    let (spec, weights) = (checkpoint.spec().clone(), checkpoint.load_weights(Precision::Auto, &mut |_| ()).unwrap());
    let head = checkpoint::open_head("oasis-tiny-eagle3").unwrap().load(&spec, Precision::Auto, &mut |_| ()).unwrap();
    let prompt: Vec<TokenId> = (0..PROMPT).map(|index| TokenId((index * index * 7 % spec.vocab) as u32)).collect();
    let model = Arc::new(CpuModel::new(spec, weights, Some(Arc::new(head))));
    let state = PromptState::read(&model, &prompt, 512, &mut |_, _| ());
    for predictor in ["predictor.kind=draft-query", "predictor.kind=last-query"] {
        for selector in [&["selector.fetch_ratio=0.25"][..], &["selector.kind=lfu"], &["selector.kind=fetch-all"]] {
            let admitted = compare(&model, &state, &[&[predictor], selector].concat());
            assert!(admitted > 0, "{predictor}, {selector:?}");
        }
    }
}
