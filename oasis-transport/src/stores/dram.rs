//! `dram`: blocks in host memory.

use super::rules::{self, unreserved};
use crate::slab::Slab;
use async_trait::async_trait;
use oasis_core::config::Bytes;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, LayerId, RequestId};
use oasis_core::memory::{
    BlockWrite, EntryKey, FetchedEntries, HostBytes, HostEntry, KvStore, Reservation, StoreError, StoreSpec, StoreUsage,
};
use oasis_core::policy::SpecError;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Keeps blocks in ordinary host memory. A fetch lends the blocks themselves: nothing is copied.
///
/// Memory is taken from the operating system as blocks are written and recycled after. Entries still lent out when
/// their request is released come on top of `capacity` until they are dropped.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dram {
    /// Most bytes of KV that reservations may add up to.
    pub capacity: Bytes,
}

impl Default for Dram {
    fn default() -> Self {
        Self { capacity: Bytes(8 << 30) }
    }
}

oasis_core::register! {
    kind: "dram", about: "Blocks in host memory, lent out without a copy", device_code: false,
    impl StoreSpec for Dram {
        fn build(&self) -> Result<Arc<dyn KvStore>, SpecError> {
            let Bytes(capacity) = self.capacity;
            if capacity == 0 {
                return Err(SpecError::new("capacity", "a size above 0", 0)
                    .hint("every block of every request is kept here; 8GiB is the default"));
            }
            Ok(in_memory(capacity, Arc::new(Slab::new(capacity))))
        }

        fn host_memory(&self) -> Option<u64> {
            Some(self.capacity.0)
        }
    }
}

/// Where blocks get their memory.
pub(crate) trait BlockMemory: Send + Sync {
    /// A copy of `bytes`, aligned to 64 bytes; `None` when there is no room for it.
    fn copy(&self, bytes: &[u8]) -> Option<Arc<dyn HostBytes>>;
}

impl BlockMemory for Arc<Slab> {
    fn copy(&self, bytes: &[u8]) -> Option<Arc<dyn HostBytes>> {
        Some(Arc::new(self.block(bytes)))
    }
}

/// A store whose blocks lie in `memory`, reservations adding up to at most `capacity` bytes.
pub(crate) fn in_memory(capacity: u64, memory: Arc<dyn BlockMemory>) -> Arc<dyn KvStore> {
    Arc::new(DramStore { capacity, memory, state: RwLock::default() })
}

struct DramStore {
    capacity: u64,
    memory: Arc<dyn BlockMemory>,
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    requests: HashMap<RequestId, Reserved>,
    reserved: u64,
    used: u64,
    /// Reservations made so far: tells a request from a later one of the same id.
    generation: u64,
}

/// One request's reservation and blocks.
struct Reserved {
    generation: u64,
    geometry: KvGeometry,
    /// Blocks of a layer.
    blocks: usize,
    /// Bytes set aside.
    bytes: u64,
    /// Blocks written.
    written: HashMap<(LayerId, BlockId), Arc<dyn HostBytes>>,
}

impl Reserved {
    fn check(&self, request: RequestId, layer: LayerId, writes: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        let exists = |block| self.written.contains_key(&(layer, block));
        rules::check(&self.geometry, self.blocks, request, layer, writes, exists)
    }

    fn entry(&self, key: EntryKey) -> Option<HostEntry> {
        let memory = self.written.get(&(key.layer, key.block))?.clone();
        let (head, entry) = (key.head.index(), self.geometry.entry_bytes());
        (head < self.geometry.kv_heads).then(|| HostEntry { memory, range: head * entry..(head + 1) * entry })
    }
}

impl DramStore {
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl KvStore for DramStore {
    fn usage(&self) -> StoreUsage {
        let State { requests, reserved, used, .. } = &*self.read();
        StoreUsage { capacity: self.capacity, reserved: *reserved, used: *used, requests: requests.len() }
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        let needed =
            (geometry.layers as u64).saturating_mul(blocks as u64).saturating_mul(geometry.block_bytes() as u64);
        if needed > self.capacity {
            return Reservation::TooLarge { needed, capacity: self.capacity };
        }
        // A request that reserves again starts over.
        self.release(request);
        let mut state = self.write();
        let free = self.capacity - state.reserved;
        if needed > free {
            return Reservation::Full { needed, free };
        }
        state.generation += 1;
        let generation = state.generation;
        let reserved = Reserved { generation, geometry: *geometry, blocks, bytes: needed, written: HashMap::new() };
        state.requests.insert(request, reserved);
        state.reserved += needed;
        Reservation::Granted
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        let generation = {
            let state = self.read();
            let reserved = state.requests.get(&request).ok_or_else(|| unreserved(request, layer, blocks))?;
            reserved.check(request, layer, blocks)?;
            reserved.generation
        };
        // Copied without the lock: reads go on meanwhile.
        let copies = blocks.iter().map(|write| Some((write.block, self.memory.copy(write.bytes)?)));
        let copies: Vec<_> = copies.collect::<Option<_>>().ok_or_else(|| StoreError::Medium {
            operation: "keep blocks in registered memory",
            problem: "no room: entries of requests that have ended are still lent out".to_owned(),
        })?;

        let mut state = self.write();
        // The request may have been released meanwhile, or another put of the same block may have come first.
        let reserved = (state.requests.get_mut(&request).filter(|r| r.generation == generation))
            .ok_or_else(|| unreserved(request, layer, blocks))?;
        reserved.check(request, layer, blocks)?;
        let bytes = (copies.len() * reserved.geometry.block_bytes()) as u64;
        reserved.written.extend(copies.into_iter().map(|(block, copy)| ((layer, block), copy)));
        state.used += bytes;
        Ok(())
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        let state = self.read();
        let entry = |&key: &EntryKey| {
            state.requests.get(&key.request).and_then(|r| r.entry(key)).ok_or(StoreError::Missing(key))
        };
        Ok(FetchedEntries { entries: keys.iter().map(entry).collect::<Result<_, _>>()? })
    }

    fn release(&self, request: RequestId) {
        let released = {
            let mut state = self.write();
            let released = state.requests.remove(&request);
            if let Some(reserved) = &released {
                state.reserved -= reserved.bytes;
                state.used -= (reserved.written.len() * reserved.geometry.block_bytes()) as u64;
            }
            released
        };
        // Thousands of buffers go back to the slab: not under the lock.
        drop(released);
    }
}
