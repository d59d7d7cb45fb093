//! A policy, a transport or a store that panics ends requests, with its message, and no process.

use async_trait::async_trait;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, SlotId};
use oasis_core::memory::{
    BlockWrite, EntryKey, FetchedEntries, KvStore, Reservation, StoreError, StoreUsage, Transport,
};
use oasis_core::policy::{Aggregate, PredictBatch, Predictor, SelectBatch, Selector, rank_by_score};
use oasis_core::testkit::doubles::{CopyWith, PredictWith, SelectWith, lru_selector};
use oasis_core::working_set::{Admission, Ranking, TransferPlan};
use oasis_models::cpu::SparseParts;
use oasis_tests::survivors::{default_parts, engine, solos, survivors};
use oasis_tests::within;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// The ranking of `draft-query`, and a panic in call `at`.
fn panicking_predictor(at: u64) -> Box<dyn Predictor> {
    let (mut call, mut scores) = (0, Vec::new());
    Box::new(PredictWith(move |batch: &PredictBatch<'_>, ranking: &mut Ranking| {
        call += 1;
        assert!(call != at + 1, "the predictor of the test gives up");
        rank_by_score(batch, Aggregate::Sum, &mut scores, ranking);
    }))
}

#[test]
fn a_predictor_that_panics_ends_the_batch_of_that_step() {
    within(LIMIT, || {
        let alone = solos("draft-query");
        for at in 0..30 {
            let case = format!("prediction {at}");
            let parts = SparseParts { predictor: panicking_predictor(at), ..default_parts("draft-query") };
            let errors = survivors(engine(parts), &alone, false, &case);
            let expected = "the predict stage panicked: the predictor of the test gives up";
            assert!(errors.iter().all(|e| e.ends_with(expected)), "{case}: {errors:?}");
            // What the last step of a request wants is waited for by nobody.
            assert!(at >= 20 || !errors.is_empty(), "{case}");
        }
    });
}

#[test]
fn a_selector_that_panics_or_breaks_its_contract_ends_the_batch_of_that_step() {
    within(LIMIT, || {
        let alone = solos("draft-query");
        for at in 0..30 {
            for breaks in [false, true] {
                let (mut call, mut inner) = (0, lru_selector(3));
                let plan = move |batch: &SelectBatch<'_>, plan: &mut TransferPlan| {
                    call += 1;
                    inner.plan(batch, plan);
                    if call == at + 1 {
                        assert!(breaks, "the selector of the test gives up");
                        plan.push(0, KvHead(0), Admission { block: BlockId(9999), slot: SlotId(0) });
                    }
                };
                let selector: Box<dyn Selector> = Box::new(SelectWith { cap: 3, plan });
                let case = format!("selection {at}, breaks its contract: {breaks}");
                let parts = SparseParts { selector, ..default_parts("draft-query") };
                let errors = survivors(engine(parts), &alone, false, &case);
                let expected = if breaks {
                    "the selector's plan breaks its contract: "
                } else {
                    "the select stage panicked: the selector of the test gives up"
                };
                assert!(errors.iter().all(|e| e.contains(expected)), "{case}: {errors:?}");
                assert!(at >= 20 || !errors.is_empty(), "{case}");
            }
        }
    });
}

#[test]
fn a_transport_that_panics_ends_requests_and_no_process() {
    within(LIMIT, || {
        let alone = solos("draft-query");
        for at in 0..20 {
            let case = format!("gather {at}");
            let mut call = 0;
            let transport: Box<dyn Transport> = Box::new(CopyWith(move |_| {
                call += 1;
                // The call and the one that tries again for the first member.
                assert!(call != at + 1 && call != at + 2, "the transport of the test gives up");
                Ok(())
            }));
            let parts = SparseParts { transport, ..default_parts("draft-query") };
            let errors = survivors(engine(parts), &alone, false, &case);
            let expected = "the transfer stage panicked: the transport of the test gives up";
            assert!(errors.iter().all(|e| e.contains(expected)), "{case}: {errors:?}");
            assert_eq!(errors.len(), 1, "{case}: {errors:?}");
        }
    });
}

/// A store that panics in one call, counted over puts and fetches.
struct PanickingStore {
    inner: Arc<dyn KvStore>,
    at: u64,
    calls: AtomicU64,
}

impl PanickingStore {
    fn call(&self) {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        assert!(call != self.at, "the store of the test gives up");
    }
}

#[async_trait]
impl KvStore for PanickingStore {
    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        self.inner.reserve(request, geometry, blocks)
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        self.call();
        self.inner.put(request, layer, blocks).await
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        self.call();
        self.inner.fetch(keys).await
    }

    fn release(&self, request: RequestId) {
        self.inner.release(request);
    }
}

#[test]
fn a_store_that_panics_ends_requests_and_no_process() {
    within(LIMIT, || {
        let alone = solos("draft-query");
        let mut failed = 0;
        for at in 0..60 {
            let parts = default_parts("draft-query");
            let store = Arc::new(PanickingStore { inner: parts.store, at, calls: AtomicU64::new(0) });
            let case = format!("store call {at}");
            let errors = survivors(engine(SparseParts { store, ..parts }), &alone, false, &case);
            assert!(errors.len() <= 1, "{case}: {errors:?}");
            assert!(errors.iter().all(|e| e.contains("the store of the test gives up")), "{case}: {errors:?}");
            failed += errors.len();
        }
        assert!(failed > 10, "{failed} requests failed");
    });
}
