//! Requests that begin on one executor and go on on another.

use crate::Scene;
use crate::stores::{PREDICTORS, start_through, store};
use oasis_core::engine::{Engine, GenerateRequest};
use oasis_core::executor::{Admission, Executor, Sequence};
use oasis_core::geometry::KvGeometry;
use oasis_core::hand_over::HandsOver;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::memory::KvStore;
use oasis_core::sampling::SamplingParams;
use oasis_cuda::executor::{CudaExecutor, StepMode};
use oasis_cuda::layout::LAYOUT_VERSION;
use oasis_models::cpu::fingerprint;
use oasis_nodes::{DecodeExecutor, DecodeOptions, PrefillNode, PrefillOptions, TransferMode, node_facts};
use oasis_tests::gpu::{Setup, Speech, assert_nothing_held};
use oasis_tests::models::step;
use oasis_tests::moves::Chain;
use oasis_tests::nodes::{eventually, run};
use oasis_transport::remote::{PeerOptions, Secret, Terms, Tls};
use std::sync::Arc;
use std::time::Duration;

const TOKENS: usize = 60;
const BUDGET: usize = 8;
const SECONDS: Duration = Duration::from_secs(60);

fn dram() -> Arc<dyn KvStore> {
    store(&["store.kind=dram", "store.capacity=64MiB"].map(str::to_owned))
}

fn setup(predictor: &str, prefill_layers: Option<usize>) -> Setup {
    let settings = [predictor, "selector.fetch_ratio=0.25"];
    Setup { prefill_layers, mode: StepMode::Streams, ..Setup::sparse(BUDGET, &settings, 4, 1_200) }
}

fn chain(scene: &Scene, setup: &Setup, length: usize) -> Chain<CudaExecutor> {
    Chain::new(length, dram, |store| start_through(scene, setup, store))
}

fn sequence(scene: &Scene, tokens: usize, temperature: f32) -> Sequence {
    let sampling = SamplingParams { temperature, seed: 5, ..SamplingParams::default() };
    let prompt = scene.prompts.prose(tokens, 4);
    Sequence { request: RequestId(tokens as u64), prompt, max_new_tokens: TOKENS, sampling }
}

pub fn a_request_moves_between_two_gpu_executors(scene: &Scene) {
    // Longer than the working set, shorter, shorter than a block; the first step of one completes a block.
    let sequences = [(300, 0.0), (1_007, 0.8), (40, 0.0), (9, 0.8)].map(|(tokens, heat)| sequence(scene, tokens, heat));
    let [draft, last, exact, again, ahead] = PREDICTORS;
    let others = [last, exact, again, ahead].map(|predictor| (predictor, None));
    for (predictor, prefill_layers) in [(draft, None), (draft, Some(2))].into_iter().chain(others) {
        let mut chain = chain(scene, &setup(predictor, prefill_layers), 4);
        let want = chain.say(&sequences, TOKENS, &[]);
        // After the first step, as nodes do; again and again; where a block has just been completed, and where not.
        for moves in [&[2][..], &[2, 19, 20], &[8, 13, 33], &[3, 21, 39], &[TOKENS - 1]] {
            let got = chain.say(&sequences, TOKENS, moves);
            assert!(got == want, "{predictor}, {prefill_layers:?}, moves {moves:?}: other tokens");
            chain.executors().for_each(|executor| assert_nothing_held(executor));
        }
    }
}

pub fn two_nodes_on_a_gpu_say_what_one_executor_says(scene: &Scene) {
    let twin = &scene.tiny;
    let prompts = [300, 1_007, 40, 9].map(|tokens| scene.prompts.prose(tokens, 7));
    for predictor in PREDICTORS {
        let setup = setup(predictor, None);
        let mut alone = start_through(scene, &setup, dram());
        let want: Vec<Vec<TokenId>> =
            prompts.iter().map(|prompt| Speech::alone(&mut alone, prompt, TOKENS).tokens).collect();
        let geometry: KvGeometry = alone.info().geometry;
        let weights = fingerprint(&twin.spec, &twin.weights, Some(&twin.head));
        let policies = [(predictor.to_owned(), String::new())];
        let terms = Terms {
            secret: Secret::default(),
            tls: Tls::default(),
            facts: node_facts(weights, &geometry, LAYOUT_VERSION, BUDGET, &policies),
            timeout: SECONDS,
        };
        let blocks = dram();
        let options = PrefillOptions {
            listen: "127.0.0.1:0".to_owned(),
            terms: terms.clone(),
            lease: SECONDS,
            wait: SECONDS,
            staging: None,
        };
        let prefill = PrefillNode::start(start_through(scene, &setup, blocks.clone()), blocks, options).unwrap();
        for transfer in [TransferMode::Partial, TransferMode::Full] {
            let peer =
                PeerOptions { address: prefill.address().to_string(), terms: terms.clone(), layers: twin.spec.layers };
            let options = DecodeOptions { peer, ucx: None, transfer, prefill_timeout: SECONDS };
            let start = |store| Ok(start_through(scene, &setup, store));
            let mut engine = Engine::new(DecodeExecutor::start(options, dram(), start).unwrap(), 4);
            let request = |prompt: &Vec<TokenId>| GenerateRequest {
                prompt: prompt.clone(),
                max_new_tokens: TOKENS,
                stop_tokens: Vec::new(),
                sampling: SamplingParams::default(),
            };
            // One after another in the same rows, so that every sum is made in the same order.
            for (prompt, want) in prompts.iter().zip(&want) {
                let (ids, said) = run(&mut engine, &[request(prompt)], |_, _, _| ());
                let case = format!("{predictor}, {transfer:?}, {} prompt tokens", prompt.len());
                assert!(said[0].error.is_none() && said[0].tokens == *want, "{case}: {:?}", said[0].error);
                let metrics = engine.executor().metrics(ids[0]).expect("a request of just now");
                assert!(metrics.blocks <= metrics.prompt_blocks, "{case}: a block crossed twice");
                if transfer == TransferMode::Full {
                    assert_eq!((metrics.blocks, metrics.misses), (metrics.prompt_blocks, 0), "{case}");
                }
            }
            // Together too, whatever the order in which they come.
            let requests: Vec<GenerateRequest> = prompts.iter().map(request).collect();
            let (_, said) = run(&mut engine, &requests, |_, _, _| ());
            assert!(said.iter().all(|said| said.finished && said.tokens.len() == TOKENS), "{said:?}");
            assert_nothing_held(engine.executor().inner());
        }
        eventually("the prefill node holds nothing", || {
            let status = prefill.status();
            (status.jobs, status.granted, status.store.used, status.store.requests) == (0, 0, 0, 0)
        });
    }
}

pub fn what_cannot_be_handed_over_is_refused(scene: &Scene) {
    let setup = setup(PREDICTORS[1], None);
    let sequence = sequence(scene, 300, 0.0);
    let id = sequence.request;
    let mut pinned = setup.start(&scene.device, &scene.tiny);
    let error = pinned.expect(sequence.clone()).unwrap_err().to_string();
    assert!(error.contains("expected KV that goes through a store"), "{error}");

    let mut chain = chain(scene, &setup, 2);
    let first = chain.begin(&sequence);
    let mut executors = chain.executors();
    let (from, to) = (executors.next().unwrap(), executors.next().unwrap());
    let error = from.hand_over(id).unwrap_err().to_string();
    assert_eq!(error, format!("request {id}: its first decode step has not been run yet"));
    step(from, id, first);
    assert_eq!(to.expect(sequence.clone()).unwrap(), Admission::Admitted);
    let error = to.hand_over(id).unwrap_err().to_string();
    assert_eq!(error, format!("request {id}: its prompt has not been read yet"));
    let mut state = from.hand_over(id).unwrap();
    // Neither a state with a layer less nor a slot without a block is taken.
    let slot = state.layers[1].slots[0].pop().expect("the working set is full");
    let error = to.take_over(id, &state).unwrap_err().to_string();
    assert!(error.contains("layer 1: expected 8 occupied slots, found 7"), "{error}");
    state.layers[1].slots[0].push(slot);
    let layer = state.layers.pop().expect("the model has layers");
    assert!(to.take_over(id, &state).unwrap_err().to_string().contains("layers, found"));
    state.layers.push(layer);
    // Its blocks were never granted here.
    assert!(to.take_over(id, &state).is_err());
    assert!(to.prefill(id).unwrap_err().to_string().contains("read elsewhere"));
    // The store tells the one before.
    to.release(id);
    assert_nothing_held(from);
    assert_nothing_held(to);
}
