//! The prefill node's end: blocks in registered memory.

use super::Places;
use crate::stores::{BlockMemory, in_memory};
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId};
use oasis_core::memory::{EntryKey, HostBytes, HostEntry, KvStore, StoreError};
use oasis_ucx::{Access, Buffer, Engine, Pool, Unavailable, Word};
use std::sync::Arc;

/// Registered memory for the blocks of a prefill node, and the UCX that serves it. It stays registered as long as the node
/// runs, so that peers never ask for memory that is gone.
pub struct StagingPool {
    capacity: u64,
    pool: Arc<Pool>,
    /// Serves reads; ends after the last handle of the pool.
    _engine: Engine,
}

impl std::fmt::Debug for StagingPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StagingPool").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// Buffers of a pool as memory of a store.
struct Registered(Arc<Pool>);

struct RegisteredBlock(Buffer);

impl BlockMemory for Registered {
    fn copy(&self, bytes: &[u8]) -> Option<Arc<dyn HostBytes>> {
        let mut buffer = self.0.take(bytes.len())?;
        buffer.bytes_mut().copy_from_slice(bytes);
        Some(Arc::new(RegisteredBlock(buffer)))
    }
}

impl HostBytes for RegisteredBlock {
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl StagingPool {
    /// Registers memory for `capacity` bytes of blocks, and a sixteenth more for what is still lent out when its request
    /// ends.
    ///
    /// # Errors
    /// When the machine has not as much, or does not let it be pinned.
    pub fn start(engine: Engine, capacity: u64) -> Result<Arc<Self>, Unavailable> {
        let slack = (capacity / 16).max(1 << 20);
        let len = usize::try_from(capacity.saturating_add(slack)).unwrap_or(usize::MAX);
        let pool = Arc::new(engine.pool(len, Access::Lent)?);
        Ok(Arc::new(Self { capacity, pool, _engine: engine }))
    }

    /// A store whose blocks lie in the pool; the pool is for one store.
    pub fn store(&self) -> Arc<dyn KvStore> {
        in_memory(self.capacity, Arc::new(Registered(self.pool.clone())))
    }

    /// What readers of the pool need, as `oasis_ucx::Descriptor` encodes it.
    pub fn descriptor(&self) -> Vec<u8> {
        self.pool.descriptor().encode()
    }

    /// Bytes of the pool that are lent out.
    pub fn used(&self) -> usize {
        self.pool.used()
    }

    /// Lends blocks of a request of the pool's store: of each layer the first `blocks[layer]`.
    ///
    /// # Errors
    /// When the store does not have them, or they do not lie in the pool.
    pub async fn lend(
        &self,
        store: &dyn KvStore,
        request: RequestId,
        geometry: &KvGeometry,
        blocks: &[usize],
    ) -> Result<Lending, StoreError> {
        let failed = |problem: String| StoreError::Medium { operation: "lend blocks", problem };
        let mut held = Vec::with_capacity(blocks.iter().sum());
        let mut layers = Vec::with_capacity(blocks.len());
        for (layer, &blocks) in blocks.iter().enumerate() {
            let key = |block| EntryKey {
                request,
                layer: LayerId::from(layer),
                block: BlockId::from(block),
                head: KvHead::from(0),
            };
            let keys: Vec<EntryKey> = (0..blocks).map(key).collect();
            let entries = store.fetch(&keys).await?.entries;
            let place = |entry: &HostEntry| {
                // The memory of an entry of this store is its block, whole.
                let bytes = Some(entry.memory.bytes()).filter(|bytes| bytes.len() == geometry.block_bytes());
                bytes.and_then(|bytes| self.pool.offset_of(bytes))
            };
            let places: Option<Vec<u64>> = entries.iter().map(place).collect();
            layers.push(places.ok_or_else(|| failed("expected blocks in registered memory, found others".to_owned()))?);
            held.extend(entries);
        }
        let mut epoch = [0; 8];
        getrandom::fill(&mut epoch).map_err(|error| failed(format!("no random numbers: {error}")))?;
        // 0 stands for the end.
        let epoch = u64::from_ne_bytes(epoch) | 1;
        let word = self.pool.word(epoch).ok_or_else(|| failed("no room in the registered memory".to_owned()))?;
        let places = Places { epoch, epoch_at: word.offset(), layers };
        Ok(Lending { word, places, _held: held })
    }
}

/// Blocks that a peer may read. Dropping it ends that: its epoch is gone before the blocks are given back.
pub struct Lending {
    word: Word,
    places: Places,
    /// The blocks stay where they are meanwhile, whatever the store does.
    _held: Vec<HostEntry>,
}

impl Lending {
    /// Where the blocks lie.
    pub fn places(&self) -> &Places {
        &self.places
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.word.set(0);
    }
}
