//! A store or a link that fails ends the requests concerned, with a reason, and nothing else.

use async_trait::async_trait;
use oasis_core::engine::GenerateRequest;
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{LayerId, RequestId, TokenId};
use oasis_core::memory::{
    BlockWrite, EntryCopy, EntryKey, FetchedEntries, KvStore, Reservation, StoreError, StoreUsage, Transport,
};
use oasis_core::sampling::SamplingParams;
use oasis_core::testkit::faulty::{Faults, FaultyStore, FaultyTransport};
use oasis_models::cpu::SparseParts;
use oasis_tests::drive::assert_nothing_held;
use oasis_tests::models::read;
use oasis_tests::survivors::{default_parts, engine, prompt, requests, solos, survivors};
use oasis_tests::{synthetic, within};
use std::sync::Arc;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// A store of which the given puts and fetches fail.
fn faulty_store(predictor: &str, puts: Faults, fetches: Faults) -> (SparseParts, Arc<FaultyStore>) {
    let parts = default_parts(predictor);
    let store = Arc::new(FaultyStore { inner: parts.store.clone(), puts, fetches });
    (SparseParts { store: store.clone(), ..parts }, store)
}

/// Calls of each kind that the three requests make when nothing fails: puts, fetches, gathers.
fn calls(predictor: &str) -> [u64; 3] {
    let (parts, store) = faulty_store(predictor, Faults::none(), Faults::none());
    let faults = Arc::new(Faults::none());
    let transport = Box::new(FaultyTransport { inner: parts.transport, faults: faults.clone() });
    let alone = solos(predictor);
    assert!(survivors(engine(SparseParts { transport, ..parts }), &alone, true, "no fault").is_empty());
    [store.puts.calls(), store.fetches.calls(), faults.calls()]
}

#[test]
fn a_failed_write_ends_its_own_request() {
    for predictor in ["draft-query", "last-query", "exact"] {
        within(LIMIT, move || {
            let alone = solos(predictor);
            let [puts, ..] = calls(predictor);
            assert!(puts > 20, "{puts} puts");
            for call in 0..puts {
                let case = format!("{predictor}: put {call} of {puts}");
                let (parts, _) = faulty_store(predictor, Faults::at([call]), Faults::none());
                let errors = survivors(engine(parts), &alone, false, &case);
                // What the last step of a request writes is waited for by nobody.
                assert!(errors.len() <= 1, "{case}: {errors:?}");
                assert!(errors.iter().all(|e| e.contains("put: injected fault")), "{case}: {errors:?}");
                assert!(call >= 6 || errors.len() == 1, "{case}: a write of a prompt");
            }
        });
    }
}

#[test]
fn a_failed_read_ends_its_own_request() {
    for predictor in ["draft-query", "last-query", "exact"] {
        within(LIMIT, move || {
            let alone = solos(predictor);
            let [_, fetches, _] = calls(predictor);
            let mut failed = 0;
            for call in 0..fetches {
                // A batch that fails is tried again member by member, so two calls in a row must fail.
                for width in [1, 2] {
                    let case = format!("{predictor}: fetch {call}, {width} in a row, of {fetches}");
                    let (parts, _) = faulty_store(predictor, Faults::none(), Faults::at(call..call + width));
                    let errors = survivors(engine(parts), &alone, false, &case);
                    assert!(errors.len() <= width as usize, "{case}: {errors:?}");
                    assert!(errors.iter().all(|e| e.contains("fetch: injected fault")), "{case}: {errors:?}");
                    failed += errors.len();
                }
            }
            assert!(failed as u64 > fetches / 2, "{failed} requests failed");
        });
    }
}

#[test]
fn a_failed_gather_ends_its_own_request() {
    for predictor in ["draft-query", "last-query", "exact"] {
        within(LIMIT, move || {
            let alone = solos(predictor);
            let [.., gathers] = calls(predictor);
            let mut failed = 0;
            for call in 0..gathers {
                for width in [1, 2] {
                    let case = format!("{predictor}: gather {call}, {width} in a row, of {gathers}");
                    let parts = default_parts(predictor);
                    let faults = Arc::new(Faults::at(call..call + width));
                    let transport = Box::new(FaultyTransport { inner: parts.transport, faults });
                    let errors = survivors(engine(SparseParts { transport, ..parts }), &alone, false, &case);
                    assert!(errors.len() < width as usize, "{case}: {errors:?}");
                    assert!(errors.iter().all(|e| e.contains("injected fault in gather")), "{case}: {errors:?}");
                    failed += errors.len();
                }
            }
            assert!(failed as u64 > gathers / 2, "{failed} requests failed");
        });
    }
}

#[test]
fn a_dead_medium_ends_every_request_and_no_process() {
    within(LIMIT, || {
        let alone = solos("draft-query");
        let always = || Faults::at(0..10_000);
        for (puts, fetches) in [(always(), Faults::none()), (Faults::none(), always()), (always(), always())] {
            let (parts, _) = faulty_store("draft-query", puts, fetches);
            assert_eq!(survivors(engine(parts), &alone, true, "dead store").len(), 3);
        }
        let parts = default_parts("draft-query");
        let transport = Box::new(FaultyTransport { inner: parts.transport, faults: Arc::new(always()) });
        assert_eq!(survivors(engine(SparseParts { transport, ..parts }), &alone, true, "dead link").len(), 3);
    });
}

#[test]
fn a_failed_request_stays_failed_until_it_is_released() {
    let (parts, _) = faulty_store("draft-query", Faults::none(), Faults::at([0]));
    let mut engine = engine(parts);
    let executor = engine.executor_mut();
    let id = RequestId(9);
    let token = oasis_tests::models::start(executor, id, &prompt(33, 0), 10);
    for _ in 0..3 {
        let error = executor.decode(&[DecodeRow { request: id, token }]).unwrap().remove(0).unwrap_err();
        assert!(error.to_string().contains("fetch: injected fault in call 0"), "{error}");
    }
    executor.release(id);
    assert_nothing_held(executor);
    let error = executor.decode(&[DecodeRow { request: id, token }]).unwrap().remove(0).unwrap_err();
    assert!(error.to_string().contains("found none"), "{error}");
}

#[test]
fn a_prompt_that_cannot_be_resumed_holds_nothing() {
    let (parts, _) = faulty_store("draft-query", Faults::at([1]), Faults::none());
    let mut engine = engine(parts);
    let state = read(&synthetic::model(7), &prompt(33, 0), 64);
    let executor = engine.executor_mut();
    let error = executor.resume(&state, RequestId(1), 10, SamplingParams::default()).unwrap_err();
    assert!(error.to_string().contains("put: injected fault in call 1"), "{error}");
    assert_nothing_held(executor);
    executor.resume(&state, RequestId(1), 10, SamplingParams::default()).unwrap();
}

/// Delays every gather and the writes before it, so that much is in flight whenever something ends.
struct SlowStore(Arc<dyn KvStore>);

#[async_trait]
impl KvStore for SlowStore {
    fn usage(&self) -> StoreUsage {
        self.0.usage()
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        self.0.reserve(request, geometry, blocks)
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        tokio::time::sleep(Duration::from_millis(3)).await;
        self.0.put(request, layer, blocks).await
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.0.fetch(keys).await
    }

    fn release(&self, request: RequestId) {
        self.0.release(request);
    }
}

struct SlowTransport(Box<dyn Transport>);

#[async_trait]
impl Transport for SlowTransport {
    async fn gather(&mut self, copies: &mut [EntryCopy<'_>]) -> anyhow::Result<()> {
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.0.gather(copies).await
    }
}

#[test]
fn an_id_that_is_used_again_at_once_meets_no_late_write_of_its_former_owner() {
    within(LIMIT, || {
        let alone = solos("draft-query");
        let parts = default_parts("draft-query");
        let (store, transport) = (Arc::new(SlowStore(parts.store)), Box::new(SlowTransport(parts.transport)));
        let mut engine = engine(SparseParts { store, transport, ..parts });
        let executor = engine.executor_mut();
        let id = RequestId(4);
        for (chunks, steps) in [(1, 0), (2, 0), (2, 1), (2, 2), (2, 6)] {
            // The former owner ends after so many chunks and steps.
            let GenerateRequest { prompt, max_new_tokens, sampling, .. } = requests()[1].clone();
            executor.admit(oasis_core::executor::Sequence { request: id, prompt, max_new_tokens, sampling }).unwrap();
            for _ in 0..chunks {
                executor.prefill(id).unwrap();
            }
            for _ in 0..steps {
                executor.decode(&[DecodeRow { request: id, token: TokenId(1) }]).unwrap().remove(0).unwrap();
            }
            executor.release(id);
            assert_nothing_held(executor);

            let mut token = oasis_tests::models::start(executor, id, &requests()[0].prompt, 18);
            let mut tokens = vec![token];
            while tokens.len() < 18 {
                token = oasis_tests::models::step(executor, id, token);
                tokens.push(token);
            }
            assert_eq!(tokens, alone[0].tokens, "after {chunks} chunks and {steps} steps");
            executor.release(id);
        }
    });
}
