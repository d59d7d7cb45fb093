//! Counts what fetches cost.

use oasis_core::memory::StoreMetrics;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[derive(Default)]
pub(super) struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    stall_ns: AtomicU64,
}

impl Counters {
    /// Counts a fetch of entries in memory, and of others that took `stall` to get.
    pub fn count(&self, hits: usize, misses: usize, stall: Duration) {
        self.hits.fetch_add(hits as u64, Ordering::Relaxed);
        self.misses.fetch_add(misses as u64, Ordering::Relaxed);
        self.stall_ns.fetch_add(u64::try_from(stall.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub fn metrics(&self) -> StoreMetrics {
        StoreMetrics {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            stall: Duration::from_nanos(self.stall_ns.load(Ordering::Relaxed)),
        }
    }
}
