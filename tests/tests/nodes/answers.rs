//! The same tokens, and what crosses for them.

use crate::{LIMIT, alone, setup};
use async_trait::async_trait;
use oasis_core::config::Bytes;
use oasis_core::engine::GenerateRequest;
use oasis_core::executor::Executor;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{LayerId, RequestId};
use oasis_core::memory::{
    BlockWrite, EntryKey, FetchedEntries, KvStore, Reservation, StoreError, StoreSpec, StoreUsage,
};
use oasis_core::sampling::SamplingParams;
use oasis_nodes::TransferMode;
use oasis_tests::drive::request;
use oasis_tests::nodes::{Setup, assert_idle, eventually, run};
use oasis_tests::prompts::Prompts;
use oasis_tests::survivors::{prompt, requests};
use oasis_tests::{models, references, within};
use oasis_transport::stores::Dram;
use std::sync::{Arc, OnceLock};

const BOTH: [TransferMode; 2] = [TransferMode::Full, TransferMode::Partial];

/// Contexts that end just before, at and after a block, shorter and longer than the budget.
fn boundaries() -> Vec<GenerateRequest> {
    let lengths = [1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65];
    let mut requests: Vec<_> = lengths.iter().map(|&tokens| request(&prompt(tokens, tokens as u32), 18)).collect();
    requests.extend([1, 2, 3].map(|tokens| request(&prompt(30, 4), tokens)));
    let sampling = SamplingParams { temperature: 0.9, top_p: 0.95, top_k: 20, seed: 3 };
    requests.extend([19, 34].map(|tokens| GenerateRequest { sampling, ..request(&prompt(tokens, 5), 30) }));
    requests
}

#[test]
fn two_nodes_say_what_one_says() {
    within(LIMIT, || {
        for (predictor, selector) in [
            ("draft-query", "capped-lru"),
            ("last-query", "fetch-all"),
            ("exact", "fetch-all"),
            ("freekv", "lfu"),
            ("infinigen", "hysteresis"),
        ] {
            let setup = setup(predictor, selector);
            let requests = boundaries();
            let expected = alone(&setup, &requests);
            let prefill = setup.prefill();
            for transfer in BOTH {
                let mut decode = setup.decode(prefill.address(), transfer);
                let (ids, said) = run(&mut decode, &requests, |_, _, _| ());
                for (index, (said, expected)) in said.iter().zip(&expected).enumerate() {
                    let tokens = requests[index].prompt.len();
                    assert_eq!(said, expected, "{predictor}, {transfer:?}, a prompt of {tokens} tokens");
                }
                for id in ids {
                    let metrics = decode.executor().metrics(id).expect("the last thousand are remembered");
                    assert!(metrics.blocks <= metrics.prompt_blocks, "a block crossed twice: {metrics:?}");
                    if transfer == TransferMode::Full {
                        assert_eq!((metrics.blocks, metrics.misses), (metrics.prompt_blocks, 0), "{metrics:?}");
                    }
                }
                assert_idle(&prefill, decode.executor());
            }
        }
    });
}

#[test]
fn dense_layers_cross_whole() {
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        setup.settings.push("kv.dense_layers=1".to_owned());
        let requests = [request(&prompt(35, 1), 18), request(&prompt(8, 2), 9)];
        let expected = alone(&setup, &requests);
        let prefill = setup.prefill();
        let mut decode = setup.decode(prefill.address(), TransferMode::Partial);
        let (ids, said) = run(&mut decode, &requests, |_, _, _| ());
        assert_eq!(said, expected);
        let metrics = decode.executor().metrics(ids[0]).unwrap();
        assert!(metrics.blocks >= 9 && metrics.blocks <= metrics.prompt_blocks, "{metrics:?}");
        assert_idle(&prefill, decode.executor());
    });
}

#[test]
fn partial_transfer_brings_less_and_fetches_what_is_missed_once() {
    within(LIMIT, || {
        let setup = setup("draft-query", "fetch-all");
        let requests = [request(&prompt(400, 1), 100)];
        let prefill = setup.prefill();
        let mut crossed = Vec::new();
        for transfer in BOTH {
            let sent = prefill.status().blocks_sent;
            let mut decode = setup.decode(prefill.address(), transfer);
            let (ids, _) = run(&mut decode, &requests, |_, _, _| ());
            let metrics = decode.executor().metrics(ids[0]).unwrap();
            assert_eq!(metrics.blocks, prefill.status().blocks_sent - sent);
            assert_eq!(metrics.blocks * metrics.block_bytes, metrics.admission_bytes + metrics.miss_bytes);
            crossed.push(metrics);
        }
        let [full, partial] = crossed.try_into().unwrap();
        // At most K blocks of each of 2 KV heads in each of 2 layers.
        assert!(partial.admission_bytes <= 2 * 2 * 3 * partial.block_bytes, "{partial:?}");
        assert!(partial.misses > 0 && partial.resident_bytes < full.resident_bytes, "{partial:?} {full:?}");
        assert_eq!(full.admission_bytes, 2 * 100 * full.block_bytes);
    });
}

/// A store in which nothing finds room before it is opened.
struct Held {
    inner: Arc<dyn KvStore>,
    opened: OnceLock<()>,
}

#[async_trait]
impl KvStore for Held {
    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        self.opened.wait();
        self.inner.reserve(request, geometry, blocks)
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        self.inner.put(request, layer, blocks).await
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        self.inner.fetch(keys).await
    }

    fn release(&self, request: RequestId) {
        self.inner.release(request);
    }
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    within(LIMIT, || {
        let setup = setup("draft-query", "fetch-all");
        let requests = [request(&prompt(450, 1), 6), request(&prompt(21, 2), 6), request(&prompt(22, 3), 1)];
        let expected = alone(&setup, &requests);
        let inner = Dram { capacity: Bytes(setup.staging) }.build().unwrap();
        let store = Arc::new(Held { inner, opened: OnceLock::new() });
        let prefill = setup.prefill_over(store.clone(), "127.0.0.1:0");
        // Of one decode node: the long prompt is read when all have come.
        let mut decode = setup.decode(prefill.address(), TransferMode::Partial);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                eventually("all prompts are there", || prefill.status().jobs == requests.len());
                store.opened.set(()).unwrap();
            });
            let (_, said) = run(&mut decode, &requests, |_, _, said| {
                assert!(said[0].tokens.is_empty() || said[1..].iter().all(|said| !said.tokens.is_empty()), "{said:?}");
            });
            assert_eq!(said, expected);
        });
        assert_idle(&prefill, decode.executor());

        // Of a decode node each.
        let (setup, address) = (&setup, prefill.address());
        let answers: Vec<_> = std::thread::scope(|scope| {
            let ask = |request| {
                let mut decode = setup.decode(address, TransferMode::Partial);
                run(&mut decode, std::slice::from_ref(request), |_, _, _| ()).1
            };
            let asked: Vec<_> = requests.iter().map(|request| scope.spawn(move || ask(request))).collect();
            asked.into_iter().flat_map(|asked| asked.join().unwrap()).collect()
        });
        assert_eq!(answers, expected);
        assert_idle(&prefill, decode.executor());
    });
}

/// Answers of real models, tokens of prose.
fn real(setup: &Setup, requests: &[GenerateRequest]) {
    let expected = alone(setup, requests);
    let prefill = setup.prefill();
    for transfer in BOTH {
        let mut decode = setup.decode(prefill.address(), transfer);
        assert_eq!(run(&mut decode, requests, |_, _, _| ()).1, expected, "{transfer:?}");
        assert_idle(&prefill, decode.executor());
    }
}

#[test]
fn oasis_tiny_says_the_same_on_two_nodes() {
    within(LIMIT, || {
        let prompts = Prompts::new();
        let requests = [request(&prompts.passkey(48213, 700, 0), 24), request(&prompts.prose(500, 1), 40)];
        real(&Setup::new(models::oasis_tiny(), models::options(256), 8, &[]), &requests);
    });
}

#[test]
fn smollm2_says_the_same_on_two_nodes() {
    let Some(path) = references::smollm2() else { return };
    within(LIMIT, move || {
        let model = models::load(path.to_str().unwrap(), None);
        let tokens = |count: u32, seed: u32| {
            (0..count).map(|i| oasis_core::ids::TokenId((i * 7919 + i * i * seed) % 40_000 + 100)).collect::<Vec<_>>()
        };
        let requests = [request(&tokens(600, 3), 24), request(&tokens(337, 5), 24)];
        real(&Setup::new(model, models::options(256), 12, &["predictor.kind=last-query"]), &requests);
    });
}

#[test]
fn a_staging_pool_that_is_full_makes_a_prompt_wait() {
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        // Room for one of the three prompts, each of 8 to 10 blocks in 2 layers.
        setup.staging = 2 * 11 * setup.single().executor().info().geometry.block_bytes() as u64;
        let expected = alone(&setup, &requests());
        let prefill = setup.prefill();
        let mut decode = setup.decode(prefill.address(), TransferMode::Partial);
        let (_, said) = run(&mut decode, &requests(), |_, _, _| assert!(prefill.status().granted <= 1));
        assert_eq!(said, expected);
        let (_, said) = run(&mut decode, &[request(&prompt(60, 1), 9)], |_, _, _| ());
        let error = said[0].error.as_ref().expect("a prompt that never fits");
        assert!(error.contains("the KV store is too small"), "{error}");
        assert_idle(&prefill, decode.executor());
    });
}
