//! A store whose blocks of the prompt lie on another node until they are needed.

use super::message::BlockRead;
use super::reader::{BlockReader, MAX_READ_BYTES};
use async_trait::async_trait;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, LayerId, RequestId};
use oasis_core::memory::{
    BlockWrite, EntryKey, FetchedEntries, KvStore, Reservation, StoreError, StoreMetrics, StoreUsage,
};
use oasis_core::working_set::BlockSet;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::task::JoinSet;

/// Reads of one admission in flight.
const READS_AHEAD: usize = 4;

/// Bytes of blocks that crossed for one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestTraffic {
    /// Bytes of blocks before the request decoded here.
    pub admission_bytes: u64,
    /// Bytes of blocks that its steps missed.
    pub miss_bytes: u64,
    /// Blocks of a layer that crossed.
    pub blocks: u64,
    /// Fetches of a layer that missed something.
    pub misses: u64,
    /// Blocks of all layers that the prefill node has: those of the prompt that do not travel as its tail.
    pub prompt_blocks: u64,
    /// Bytes of one block of a layer.
    pub block_bytes: u64,
    /// Bytes of the request in the store behind this one.
    pub resident_bytes: u64,
}

/// Keeps what has crossed from a prefill node, and what was decoded since, in a store of this node. A block of the prompt
/// that is not here yet is a miss: it is fetched, all KV heads of it, and stays until the request ends, so that no block
/// crosses twice. A fetch sends one read for everything it misses.
///
/// Room is reserved for the whole context, as everywhere; memory is taken as blocks come.
pub struct RemoteStore {
    inner: Arc<dyn KvStore>,
    reader: Arc<dyn BlockReader>,
    requests: Mutex<HashMap<RequestId, Granted>>,
    /// Held while misses are on their way, so that two fetches do not ask for the same block.
    fetching: tokio::sync::Mutex<()>,
    peak: AtomicU64,
}

/// One request's blocks.
struct Granted {
    geometry: KvGeometry,
    /// Blocks that the prefill node has, one count a layer.
    blocks: Vec<usize>,
    /// Blocks that are here, one set a layer.
    here: Vec<BlockSet>,
    traffic: RequestTraffic,
}

impl Granted {
    fn is_missing(&self, layer: LayerId, block: BlockId) -> bool {
        self.blocks.get(layer.index()).is_some_and(|&blocks| block.index() < blocks)
            && self.here.get(layer.index()).is_some_and(|here| !here.contains(block))
    }

    fn arrived(&mut self, layer: LayerId, blocks: impl Iterator<Item = BlockId>) {
        if let Some(here) = self.here.get_mut(layer.index()) {
            let new = blocks.filter(|&block| here.insert(block)).count();
            self.traffic.resident_bytes += (new * self.geometry.block_bytes()) as u64;
        }
    }
}

fn failed(problem: impl ToString) -> StoreError {
    StoreError::Medium { operation: "fetch from the prefill node", problem: problem.to_string() }
}

impl RemoteStore {
    /// Blocks go to `inner`; those that are not there are asked of `reader`.
    pub fn new(inner: Arc<dyn KvStore>, reader: Arc<dyn BlockReader>) -> Self {
        Self {
            inner,
            reader,
            requests: Mutex::default(),
            fetching: tokio::sync::Mutex::default(),
            peak: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, Granted>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the first blocks of a reserved request, `blocks[layer]` of them, can be read from the prefill node.
    pub fn grant(&self, request: RequestId, blocks: Vec<usize>) {
        if let Some(granted) = self.lock().get_mut(&request) {
            granted.traffic.prompt_blocks = blocks.iter().sum::<usize>() as u64;
            granted.blocks = blocks;
            granted.traffic.block_bytes = granted.geometry.block_bytes() as u64;
        }
    }

    /// Brings blocks here before the request decodes, layer by layer.
    ///
    /// # Errors
    /// When the prefill node does not send one of them.
    pub async fn admit(
        self: &Arc<Self>,
        request: RequestId,
        layers: Vec<(LayerId, Vec<BlockId>)>,
    ) -> Result<(), StoreError> {
        let mut reads = JoinSet::new();
        let finish = |joined: Result<Result<(), StoreError>, tokio::task::JoinError>| joined.map_err(failed)?;
        for (layer, blocks) in layers {
            for blocks in blocks.chunks(self.blocks_of_a_read(request)) {
                if reads.len() >= READS_AHEAD
                    && let Some(joined) = reads.join_next().await
                {
                    finish(joined)?;
                }
                let (store, blocks) = (self.clone(), blocks.to_vec());
                reads.spawn(async move {
                    let wanted = BTreeMap::from([((request, layer), blocks.into_iter().collect())]);
                    store.bring(wanted, |traffic, bytes| traffic.admission_bytes += bytes).await
                });
            }
        }
        while let Some(joined) = reads.join_next().await {
            finish(joined)?;
        }
        Ok(())
    }

    fn blocks_of_a_read(&self, request: RequestId) -> usize {
        let bytes = self.lock().get(&request).map_or(1, |granted| granted.geometry.block_bytes());
        (MAX_READ_BYTES / bytes).max(1)
    }

    /// What has crossed for a request that has not been released.
    pub fn traffic(&self, request: RequestId) -> Option<RequestTraffic> {
        self.lock().get(&request).map(|granted| granted.traffic)
    }

    /// Most bytes of KV that have ever been here at once.
    pub fn peak_bytes(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Of `keys`, the blocks that are neither here nor unknown.
    fn missing(&self, keys: &[EntryKey]) -> BTreeMap<(RequestId, LayerId), BTreeSet<BlockId>> {
        let requests = self.lock();
        let mut missing: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for &EntryKey { request, layer, block, head } in keys {
            let granted = requests.get(&request);
            if granted.is_some_and(|g| head.index() < g.geometry.kv_heads && g.is_missing(layer, block)) {
                missing.entry((request, layer)).or_default().insert(block);
            }
        }
        missing
    }

    /// Fetches blocks and puts them into the inner store; `count` adds the bytes of one part.
    async fn bring(
        &self,
        wanted: BTreeMap<(RequestId, LayerId), BTreeSet<BlockId>>,
        count: impl Fn(&mut RequestTraffic, u64),
    ) -> Result<(), StoreError> {
        // One request's failure is its own: what came for the others is kept.
        let mut result = Ok(());
        for parts in self.batches(wanted) {
            let answers = self.reader.read(parts.clone()).await;
            if answers.len() != parts.len() {
                return Err(failed(format!("expected {} answers, found {}", parts.len(), answers.len())));
            }
            for (part, answer) in parts.into_iter().zip(answers) {
                let taken = match answer {
                    Ok(arrived) => self.take(&part, arrived.bytes(), &count).await,
                    Err(reason) => Err(failed(reason)),
                };
                if result.is_ok() {
                    result = taken;
                }
            }
        }
        result
    }

    /// Reads of at most [`MAX_READ_BYTES`], or one block.
    fn batches(&self, wanted: BTreeMap<(RequestId, LayerId), BTreeSet<BlockId>>) -> Vec<Vec<BlockRead>> {
        let (mut batches, mut batch, mut room) = (Vec::new(), Vec::new(), MAX_READ_BYTES);
        for ((request, layer), blocks) in wanted {
            let block_bytes = self.lock().get(&request).map_or(1, |granted| granted.geometry.block_bytes());
            let mut blocks = blocks.into_iter().peekable();
            while blocks.peek().is_some() {
                if room < block_bytes && !batch.is_empty() {
                    batches.push(std::mem::take(&mut batch));
                    room = MAX_READ_BYTES;
                }
                let blocks: Vec<BlockId> = blocks.by_ref().take((room / block_bytes).max(1)).collect();
                room = room.saturating_sub(blocks.len() * block_bytes);
                batch.push(BlockRead { request: request.0, layer, blocks });
            }
        }
        batches.extend(Some(batch).filter(|batch| !batch.is_empty()));
        batches
    }

    async fn take(
        &self,
        part: &BlockRead,
        bytes: &[u8],
        count: &impl Fn(&mut RequestTraffic, u64),
    ) -> Result<(), StoreError> {
        let BlockRead { request, layer, blocks } = part;
        let request = RequestId(*request);
        let Some(block_bytes) = self.lock().get(&request).map(|granted| granted.geometry.block_bytes()) else {
            return Err(failed(format!("request {request} was released meanwhile")));
        };
        if bytes.len() != blocks.len() * block_bytes {
            let expected = blocks.len() * block_bytes;
            return Err(failed(format!("expected {expected} bytes of blocks, found {}", bytes.len())));
        }
        let writes: Vec<BlockWrite<'_>> = (blocks.iter().zip(bytes.chunks_exact(block_bytes)))
            .map(|(&block, bytes)| BlockWrite { block, bytes })
            .collect();
        self.inner.put(request, *layer, &writes).await?;
        if let Some(granted) = self.lock().get_mut(&request) {
            granted.arrived(*layer, blocks.iter().copied());
            granted.traffic.blocks += blocks.len() as u64;
            count(&mut granted.traffic, bytes.len() as u64);
        }
        self.peak.fetch_max(self.inner.usage().used, Ordering::Relaxed);
        Ok(())
    }
}

#[async_trait]
impl KvStore for RemoteStore {
    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }

    fn metrics(&self) -> StoreMetrics {
        self.inner.metrics()
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        let answer = self.inner.reserve(request, geometry, blocks);
        if answer == Reservation::Granted {
            let here = vec![BlockSet::default(); geometry.layers];
            let granted = Granted { geometry: *geometry, blocks: Vec::new(), here, traffic: RequestTraffic::default() };
            self.lock().insert(request, granted);
        }
        answer
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        self.inner.put(request, layer, blocks).await?;
        if let Some(granted) = self.lock().get_mut(&request) {
            granted.arrived(layer, blocks.iter().map(|write| write.block));
        }
        self.peak.fetch_max(self.inner.usage().used, Ordering::Relaxed);
        Ok(())
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        if !self.missing(keys).is_empty() {
            let _fetching = self.fetching.lock().await;
            // Another fetch may have brought them meanwhile.
            let missing = self.missing(keys);
            if !missing.is_empty() {
                let count = |traffic: &mut RequestTraffic, bytes| {
                    traffic.miss_bytes += bytes;
                    traffic.misses += 1;
                };
                self.bring(missing, count).await?;
            }
        }
        self.inner.fetch(keys).await
    }

    fn release(&self, request: RequestId) {
        let released = self.lock().remove(&request);
        self.inner.release(request);
        if released.is_some() {
            self.reader.release(request);
        }
    }
}

#[cfg(test)]
mod tests;
