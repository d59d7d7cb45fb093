//! The full KV in a store that the device does not address.

use crate::Scene;
use oasis_core::config::{Layer, Resolved};
use oasis_core::executor::{Admission, DecodeRow, Executor, PrefillProgress, Sequence};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::memory::KvStore;
use oasis_core::testkit::faulty::{Faults, FaultyStore};
use oasis_cuda::executor::{CudaExecutor, HostParts, Residency, StepMode};
use oasis_tests::gpu::{self, Setup, Speech, assert_nothing_held, step_all};
use oasis_tests::models::start;
use std::sync::Arc;

pub const PREDICTORS: [&str; 5] = [
    "predictor.kind=draft-query",
    "predictor.kind=last-query",
    "predictor.kind=exact",
    "predictor.kind=freekv",
    "predictor.kind=infinigen",
];

pub fn store(settings: &[String]) -> Arc<dyn KvStore> {
    let layers: Vec<Layer> = settings.iter().map(|set| Layer::assignment("--set", set).unwrap()).collect();
    Resolved::new(&layers).unwrap().config.store.build().unwrap()
}

pub fn start_through(scene: &Scene, setup: &Setup, store: Arc<dyn KvStore>) -> CudaExecutor {
    let mut options = setup.options(&scene.tiny.spec);
    let Residency::Sparse(sparse) = &mut options.residency else { unreachable!("these setups are sparse") };
    sparse.through_store = true;
    let parts = HostParts { store: Some(store), ..HostParts::default() };
    gpu::start_with(&scene.device, &scene.tiny, options, parts).unwrap()
}

/// What three requests of several lengths say together.
fn together(executor: &mut CudaExecutor, prompts: &[Vec<TokenId>], tokens: usize) -> Vec<Vec<TokenId>> {
    let mut rows: Vec<_> = (prompts.iter().enumerate())
        .map(|(index, prompt)| {
            let id = RequestId(index as u64 + 1);
            (id, vec![start(executor, id, prompt, tokens)])
        })
        .collect();
    (1..tokens).for_each(|_| step_all(executor, &mut rows));
    rows.iter().for_each(|(id, _)| executor.release(*id));
    rows.into_iter().map(|(_, tokens)| tokens).collect()
}

pub fn stores_that_the_device_does_not_address_say_what_pinned_memory_says(scene: &Scene) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let ssd = |name: &str| {
        vec![
            "store.kind=ssd".to_owned(),
            format!("store.directory=\"{}\"", path(name)),
            "store.capacity=1GiB".to_owned(),
        ]
    };
    let prompts = [300, 1_007, 40].map(|tokens| scene.prompts.prose(tokens, 4));
    for predictor in PREDICTORS {
        // A prompt of few layers on the device has its first step bring the others back.
        for prefill_layers in [None, Some(2)] {
            let settings = [predictor, "selector.fetch_ratio=0.25"];
            let mut setup = Setup { prefill_layers, ..Setup::sparse(8, &settings, 4, 1_200) };
            setup.mode = StepMode::Streams;
            let mut pinned = setup.start(&scene.device, &scene.tiny);
            let want = together(&mut pinned, &prompts, 50);
            let admitted = pinned.stats().admitted_entries;
            assert!(admitted > 0);
            let stores = [
                ("dram", vec!["store.kind=dram".to_owned(), "store.capacity=64MiB".to_owned()]),
                ("ssd", ssd(&format!("{predictor}-{prefill_layers:?}"))),
            ];
            for (name, settings) in stores {
                let store = store(&settings);
                let mut through = start_through(scene, &setup, store.clone());
                assert!(through.info().device.contains("through a store"), "{}", through.info().device);
                for round in 0..2 {
                    let got = together(&mut through, &prompts, 50);
                    assert!(got == want, "{predictor}, {prefill_layers:?}, {name}, round {round}: other tokens");
                    assert_nothing_held(&through);
                }
                assert_eq!(through.stats().admitted_entries, 2 * admitted, "{predictor}, {name}");
            }
        }
    }
}

/// A first request decodes, a second one joins when lists of the first are on their way, a third when the first is gone.
fn one_after_another(executor: &mut CudaExecutor, prompts: &[Vec<TokenId>]) -> Vec<Vec<TokenId>> {
    let mut rows: Vec<(RequestId, Vec<TokenId>)> = Vec::new();
    let mut said = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        if index == 2 {
            let (first, tokens) = rows.remove(0);
            executor.release(first);
            said.push(tokens);
        }
        let id = RequestId(index as u64 + 1);
        rows.push((id, vec![start(executor, id, prompt, 70)]));
        (0..20).for_each(|_| step_all(executor, &mut rows));
    }
    rows.iter().for_each(|(id, _)| executor.release(*id));
    said.extend(rows.into_iter().map(|(_, tokens)| tokens));
    said
}

pub fn requests_join_and_leave_while_entries_come_from_a_store(scene: &Scene) {
    let prompts = [500, 700, 333].map(|tokens| scene.prompts.prose(tokens, 9));
    for predictor in PREDICTORS {
        for prefill_layers in [None, Some(2)] {
            let setup = Setup::sparse(8, &[predictor, "selector.fetch_ratio=0.25"], 2, 800);
            let setup = Setup { prefill_layers, mode: StepMode::Streams, ..setup };
            let want = one_after_another(&mut setup.start(&scene.device, &scene.tiny), &prompts);
            let settings = ["store.kind=dram", "store.capacity=64MiB"].map(str::to_owned);
            let mut through = start_through(scene, &setup, store(&settings));
            assert!(one_after_another(&mut through, &prompts) == want, "{predictor}, {prefill_layers:?}: other tokens");
            assert_nothing_held(&through);
        }
    }
}

pub fn a_store_that_fails_ends_its_request_alone(scene: &Scene) {
    let prompts = [500, 400].map(|tokens| scene.prompts.prose(tokens, 6));
    let setup = Setup::sparse(8, &["predictor.kind=last-query", "selector.fetch_ratio=0.5"], 2, 700);
    let layers = scene.tiny.spec.layers as u64;
    let settings = ["store.kind=dram", "store.capacity=64MiB"].map(str::to_owned);
    let want = {
        let mut executor = start_through(scene, &setup, store(&settings));
        prompts.each_ref().map(|prompt| Speech::alone(&mut executor, prompt, 40).tokens)
    };
    let mut failures = 0;
    // Writes of a prompt, of a completed block, and reads here and there.
    let faults = [(Some(layers - 1), None), (Some(2 * layers + 1), None), (None, Some(0)), (None, Some(90))];
    for (put, fetch) in faults {
        let faulty = FaultyStore { inner: store(&settings), puts: Faults::at(put), fetches: Faults::at(fetch) };
        let mut executor = start_through(scene, &setup, Arc::new(faulty));
        let mut rows = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            let request = RequestId(index as u64);
            let sequence =
                Sequence { request, prompt: prompt.clone(), max_new_tokens: 40, sampling: Default::default() };
            assert_eq!(executor.admit(sequence).unwrap(), Admission::Admitted);
            let first = loop {
                match executor.prefill(request) {
                    Ok(PrefillProgress::Running { .. }) => {}
                    Ok(PrefillProgress::Done(token)) => break Ok(token),
                    Err(error) => break Err(error),
                }
            };
            rows.push((request, first.map(|token| vec![token])));
        }
        for _ in 1..40 {
            let decoding: Vec<DecodeRow> = (rows.iter())
                .filter_map(|(request, said)| said.as_ref().ok().map(|said| (*request, *said.last().unwrap())))
                .map(|(request, token)| DecodeRow { request, token })
                .collect();
            let mut results = executor.decode(&decoding).unwrap().into_iter();
            for (_, said) in rows.iter_mut().filter(|(_, said)| said.is_ok()) {
                match results.next().expect("one result a row") {
                    Ok(token) => said.as_mut().unwrap().push(token),
                    Err(error) => *said = Err(error),
                }
            }
        }
        for ((request, said), want) in rows.iter().zip(&want) {
            match said {
                Ok(said) => assert!(said == want, "request {request} of {put:?}, {fetch:?}: other tokens"),
                Err(error) => {
                    failures += 1;
                    let error = error.to_string();
                    assert!(
                        error.contains("injected fault") && error.contains(&format!("request {request}")),
                        "{error}"
                    );
                }
            }
        }
        rows.iter().for_each(|(request, _)| executor.release(*request));
        assert_nothing_held(&executor);
        assert!(Speech::alone(&mut executor, &prompts[1], 40).tokens == want[1], "after {put:?}, {fetch:?}");
    }
    assert_eq!(failures, faults.len(), "each fault ends one request");
}
