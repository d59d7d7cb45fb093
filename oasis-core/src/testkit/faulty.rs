//! Fault injection: wrappers that fail chosen calls.

use super::Random;
use crate::geometry::KvGeometry;
use crate::ids::{LayerId, RequestId};
use crate::memory::{
    BlockWrite, EntryCopy, EntryKey, FetchedEntries, KvStore, Reservation, StoreError, StoreMetrics, StoreUsage,
    Transport,
};
use async_trait::async_trait;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Which calls fail; calls are counted from 0.
#[derive(Debug, Default)]
pub struct Faults {
    calls: AtomicU64,
    failing: BTreeSet<u64>,
}

impl Faults {
    /// No call fails.
    pub fn none() -> Self {
        Self::default()
    }

    /// The `n`-th call fails, for every `n` given.
    pub fn at(failing: impl IntoIterator<Item = u64>) -> Self {
        Self { calls: AtomicU64::new(0), failing: failing.into_iter().collect() }
    }

    /// About one in `n` of the first `calls` calls fails; which ones depends on `seed` alone.
    pub fn seeded(seed: u64, n: usize, calls: u64) -> Self {
        let mut random = Random::new(seed);
        Self::at((0..calls).filter(|_| random.one_in(n)))
    }

    /// Calls made so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Counts a call; the number of the call when it fails.
    fn strike(&self) -> Result<(), u64> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if self.failing.contains(&call) { Err(call) } else { Ok(()) }
    }
}

/// A transport of which chosen gathers fail without moving anything.
pub struct FaultyTransport {
    /// What moves entries otherwise.
    pub inner: Box<dyn Transport>,
    /// Gathers that fail.
    pub faults: Arc<Faults>,
}

#[async_trait]
impl Transport for FaultyTransport {
    async fn gather(&mut self, copies: &mut [EntryCopy<'_>]) -> anyhow::Result<()> {
        self.faults.strike().map_err(|call| anyhow::anyhow!("injected fault in gather {call}"))?;
        self.inner.gather(copies).await
    }
}

/// A store of which chosen writes and reads fail.
pub struct FaultyStore {
    /// What holds blocks otherwise.
    pub inner: Arc<dyn KvStore>,
    /// Writes that fail.
    pub puts: Faults,
    /// Reads that fail.
    pub fetches: Faults,
}

fn medium(operation: &'static str) -> impl Fn(u64) -> StoreError {
    move |call| StoreError::Medium { operation, problem: format!("injected fault in call {call}") }
}

#[async_trait]
impl KvStore for FaultyStore {
    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }

    fn metrics(&self) -> StoreMetrics {
        self.inner.metrics()
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        self.inner.reserve(request, geometry, blocks)
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        self.puts.strike().map_err(medium("put"))?;
        self.inner.put(request, layer, blocks).await
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        self.fetches.strike().map_err(medium("fetch"))?;
        self.inner.fetch(keys).await
    }

    fn release(&self, request: RequestId) {
        self.inner.release(request);
    }
}
