//! `tiered`: host memory in front of another store.

#[cfg(test)]
mod tests;

use super::counters::Counters;
use crate::slab::{Block, Slab};
use async_trait::async_trait;
use oasis_core::config::Bytes;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId};
use oasis_core::memory::{
    BlockWrite, EntryKey, FetchedEntries, HostBytes, HostEntry, KvStore, Reservation, StoreError, StoreMetrics,
    StoreSpec, StoreUsage,
};
use oasis_core::policy::SpecError;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Keeps entries that are asked for again and again in host memory, and everything in another store.
///
/// Blocks go to the backing store and, entry by entry, to memory; entries that were not in memory come back to it when
/// they are fetched. Admission is that of Clock-PRO: one use gives an entry a short stay in a small part of the memory,
/// a second use a place in the large one, so that a prompt read once from end to end pushes nothing out. Entries of
/// released requests are out of reach at once and make way as others come.
///
/// A part of the memory, the *staging*, is never given to the cache: reads from the backing store land there, however
/// full the cache is. Entries still lent out when they leave the cache come on top until they are dropped.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tiered {
    /// Most bytes of host memory, staging included.
    pub dram: Bytes,
    /// Bytes of it that reads from the backing store have for themselves.
    pub staging: Bytes,
    /// The store that holds everything.
    pub backing: Box<dyn StoreSpec>,
}

impl Default for Tiered {
    fn default() -> Self {
        #[cfg(unix)]
        let backing = Box::new(super::Ssd::default());
        #[cfg(not(unix))]
        let backing = Box::new(super::Dram::default());
        Self { dram: Bytes(8 << 30), staging: Bytes(256 << 20), backing }
    }
}

oasis_core::register! {
    kind: "tiered", about: "Host memory for what is used again, in front of another store", device_code: false,
    impl StoreSpec for Tiered {
        fn build(&self) -> Result<Arc<dyn KvStore>, SpecError> {
            let (dram, staging) = (self.dram.0, self.staging.0);
            if staging == 0 {
                return Err(SpecError::new("staging", "a size above 0", 0)
                    .hint("entries from the backing store pass through it; 256MiB is the default"));
            }
            if dram <= staging {
                return Err(SpecError::new("dram", format!("more than the staging of {}", self.staging), self.dram)
                    .hint("what is left of it keeps entries; 8GiB is the default"));
            }
            let backing = self.backing.build().map_err(|error| SpecError {
                field: "backing",
                expected: format!("{}: {}", error.field, error.expected),
                found: error.found,
                hint: error.hint,
            })?;
            Ok(Arc::new(TieredStore::new(dram - staging, staging, backing)))
        }
    }
}

/// An entry of one reservation: request ids come again, generations do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct CachedKey {
    generation: u64,
    layer: LayerId,
    block: BlockId,
    head: KvHead,
}

impl CachedKey {
    fn new(generation: u64, key: &EntryKey) -> Self {
        Self { generation, layer: key.layer, block: key.block, head: key.head }
    }
}

#[derive(Clone)]
struct BySize;

impl Weighter<CachedKey, Arc<Block>> for BySize {
    fn weight(&self, _: &CachedKey, entry: &Arc<Block>) -> u64 {
        entry.bytes().len() as u64
    }
}

/// Entries for which the cache plans its tables; others work as well.
const USUAL_ENTRY: u64 = 8192;

/// Unit of the staging: a semaphore counts no single bytes of large memories.
const STAGING_UNIT: u64 = 4096;

struct TieredStore {
    backing: Arc<dyn KvStore>,
    requests: RwLock<Requests>,
    cache: Cache<CachedKey, Arc<Block>, BySize>,
    slab: Arc<Slab>,
    /// Free units of the staging.
    staging: Semaphore,
    staging_units: u32,
    counters: Counters,
}

#[derive(Default)]
struct Requests {
    live: HashMap<RequestId, (u64, KvGeometry)>,
    /// Reservations made so far.
    generation: u64,
}

impl TieredStore {
    fn new(cache: u64, staging: u64, backing: Arc<dyn KvStore>) -> Self {
        let options = OptionsBuilder::new()
            .weight_capacity(cache)
            .estimated_items_capacity((cache / USUAL_ENTRY).max(1) as usize)
            .build()
            .expect("both capacities are set");
        let staging_units = (staging / STAGING_UNIT).clamp(1, u64::from(u32::MAX).min(Semaphore::MAX_PERMITS as u64));
        Self {
            backing,
            requests: RwLock::default(),
            cache: Cache::with_options(options, BySize, DefaultHashBuilder::default(), DefaultLifecycle::default()),
            slab: Slab::new(cache),
            staging: Semaphore::new(staging_units as usize),
            staging_units: staging_units as u32,
            counters: Counters::default(),
        }
    }

    fn live(&self, request: RequestId) -> Option<(u64, KvGeometry)> {
        self.requests.read().unwrap_or_else(PoisonError::into_inner).live.get(&request).copied()
    }

    /// Puts a copy of an entry into the cache.
    fn admit(&self, key: CachedKey, bytes: &[u8]) -> Arc<Block> {
        let entry = Arc::new(self.slab.block(bytes));
        self.cache.insert(key, entry.clone());
        entry
    }

    /// Entries in memory, and the places of those that are not, with their keys and sizes.
    fn look_up(&self, keys: &[EntryKey]) -> Result<(Vec<Option<HostEntry>>, Vec<Missed>), StoreError> {
        let requests = self.requests.read().unwrap_or_else(PoisonError::into_inner);
        let (mut entries, mut missed) = (Vec::with_capacity(keys.len()), Vec::new());
        for (index, key) in keys.iter().enumerate() {
            let &(generation, geometry) = requests.live.get(&key.request).ok_or(StoreError::Missing(*key))?;
            let cached = CachedKey::new(generation, key);
            let entry = self.cache.get(&cached).map(lend);
            if entry.is_none() {
                missed.push(Missed { index, key: *key, cached, bytes: geometry.entry_bytes() });
            }
            entries.push(entry);
        }
        Ok((entries, missed))
    }

    /// Reads `missed`, as much at a time as the staging holds, to their places in `entries`.
    async fn read(&self, missed: &[Missed], entries: &mut [Option<HostEntry>]) -> Result<(), StoreError> {
        let mut rest = missed;
        while !rest.is_empty() {
            let (mut bytes, mut count) = (0, 0);
            for entry in rest {
                if count > 0 && (bytes + entry.bytes as u64).div_ceil(STAGING_UNIT) > u64::from(self.staging_units) {
                    break;
                }
                (bytes, count) = (bytes + entry.bytes as u64, count + 1);
            }
            let (part, later) = rest.split_at(count);
            // A single entry larger than the staging passes alone.
            let units = bytes.div_ceil(STAGING_UNIT).min(u64::from(self.staging_units)) as u32;
            let staged = self.staging.acquire_many(units).await.expect("it is never closed");
            let keys: Vec<EntryKey> = part.iter().map(|entry| entry.key).collect();
            let fetched = self.backing.fetch(&keys).await?;
            for (entry, memory) in part.iter().zip(&fetched.entries) {
                entries[entry.index] = Some(lend(self.admit(entry.cached, memory.bytes())));
            }
            // The memory of the backing store goes before its place does.
            drop(fetched);
            drop(staged);
            rest = later;
        }
        Ok(())
    }
}

/// An entry that is not in memory.
struct Missed {
    /// Its place in the answer.
    index: usize,
    key: EntryKey,
    cached: CachedKey,
    bytes: usize,
}

fn lend(entry: Arc<Block>) -> HostEntry {
    let range = 0..entry.bytes().len();
    HostEntry { memory: entry, range }
}

#[async_trait]
impl KvStore for TieredStore {
    fn usage(&self) -> StoreUsage {
        self.backing.usage()
    }

    fn metrics(&self) -> StoreMetrics {
        self.counters.metrics()
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        let answer = self.backing.reserve(request, geometry, blocks);
        let mut requests = self.requests.write().unwrap_or_else(PoisonError::into_inner);
        // A request that reserves again starts over.
        requests.live.remove(&request);
        if answer == Reservation::Granted {
            requests.generation += 1;
            let generation = requests.generation;
            requests.live.insert(request, (generation, *geometry));
        }
        answer
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        let live = self.live(request);
        self.backing.put(request, layer, blocks).await?;
        let Some((generation, geometry)) = live else { return Ok(()) };
        for &BlockWrite { block, bytes } in blocks {
            for (head, entry) in bytes.chunks_exact(geometry.entry_bytes()).enumerate() {
                self.admit(CachedKey { generation, layer, block, head: KvHead::from(head) }, entry);
            }
        }
        Ok(())
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        let (mut entries, missed) = self.look_up(keys)?;
        let mut stall = Duration::ZERO;
        if !missed.is_empty() {
            let start = Instant::now();
            self.read(&missed, &mut entries).await?;
            stall = start.elapsed();
        }
        self.counters.count(keys.len() - missed.len(), missed.len(), stall);
        Ok(FetchedEntries { entries: entries.into_iter().map(|e| e.expect("all were read")).collect() })
    }

    fn release(&self, request: RequestId) {
        self.requests.write().unwrap_or_else(PoisonError::into_inner).live.remove(&request);
        self.backing.release(request);
    }
}
