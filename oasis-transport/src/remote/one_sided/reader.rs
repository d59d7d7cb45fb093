//! The decode node's end: reads of the prefill node's memory.

use super::super::message::BlockRead;
use super::super::peer::PrefillPeer;
use super::super::reader::{BlockReader, Lent, MAX_READ_BYTES, ReadResult};
use super::Places;
use async_trait::async_trait;
use oasis_core::ids::RequestId;
use oasis_core::memory::{HostBytes, HostEntry};
use oasis_ucx::{Access, Buffer, Descriptor, Engine, Peer, Pool, ReadError, Segment, Unavailable};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Largest reads that may be in flight at once; further ones wait for their memory.
const READS: usize = 8;

/// Reads blocks from the staging pool of a prefill node; its session says where they lie, and why they are gone.
///
/// All parts of a read are one batch of one-sided reads, in which neighbouring blocks are one; a second, small batch looks
/// whether the blocks were still lent. They land in registered memory of this node, which an answer lends.
pub struct OneSidedReader {
    session: Arc<PrefillPeer>,
    /// Of the node, for errors.
    address: String,
    engine: Engine,
    landing: Pool,
    /// Most time that a read takes.
    timeout: Duration,
    lent: Mutex<HashMap<u64, Arc<LentBlocks>>>,
    /// The connection to the pool that was lent last.
    connection: tokio::sync::Mutex<Option<Arc<Connection>>>,
}

struct LentBlocks {
    places: Places,
    block_bytes: usize,
    connection: Arc<Connection>,
}

/// One pool of one run of the prefill node.
struct Connection {
    pool: Arc<[u8]>,
    engine: Engine,
    peer: Peer,
    failed: AtomicBool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Nobody waits for the end of it.
        drop(self.engine.close(self.peer));
    }
}

/// Memory that a read has filled.
struct Landed(Buffer);

impl HostBytes for Landed {
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// Parts of a read that one connection serves.
#[derive(Default)]
struct Batch {
    /// Indices of the parts, what lends them, and where their bytes land.
    parts: Vec<(usize, Arc<LentBlocks>, std::ops::Range<usize>)>,
    segments: Vec<Segment>,
    bytes: usize,
}

impl OneSidedReader {
    /// A reader whose reads take at most `timeout` each. `session` leads to the node at `address`, and asks it for the
    /// places of blocks.
    ///
    /// # Errors
    /// When there is no memory for reads to land in.
    pub fn new(
        session: Arc<PrefillPeer>,
        address: String,
        engine: Engine,
        timeout: Duration,
    ) -> Result<Self, Unavailable> {
        let landing = engine.pool(READS * MAX_READ_BYTES, Access::Landing)?;
        let (lent, connection) = (Mutex::default(), tokio::sync::Mutex::default());
        Ok(Self { session, address, engine, landing, timeout, lent, connection })
    }

    fn lent(&self) -> MutexGuard<'_, HashMap<u64, Arc<LentBlocks>>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection to a pool: the one there is, unless it leads elsewhere or has failed.
    async fn connect(&self, pool: &Arc<[u8]>) -> Result<Arc<Connection>, ReadError> {
        let mut current = self.connection.lock().await;
        if let Some(connection) = &*current
            && connection.pool == *pool
            && !connection.failed.load(Ordering::Relaxed)
        {
            return Ok(connection.clone());
        }
        let (engine, failed) = (self.engine.clone(), AtomicBool::new(false));
        let peer = engine.connect(Descriptor::decode(pool)?).await?;
        let connection = Arc::new(Connection { pool: pool.clone(), engine, peer, failed });
        *current = Some(connection.clone());
        Ok(connection)
    }

    /// Adds a part to the batch that its connection serves.
    fn plan(&self, index: usize, part: &BlockRead, batches: &mut BTreeMap<usize, Batch>) -> Result<(), String> {
        let lent = self.lent().get(&part.request).cloned();
        let lent = lent.ok_or("the prefill node has granted no blocks of this request")?;
        let batch = batches.entry(Arc::as_ptr(&lent.connection) as usize).or_default();
        let block_bytes = lent.block_bytes;
        lent.places.plan(part, block_bytes, batch.bytes, &mut batch.segments)?;
        let range = batch.bytes..batch.bytes + part.blocks.len() * block_bytes;
        batch.bytes = range.end;
        batch.parts.push((index, lent, range));
        Ok(())
    }

    /// One batch of one-sided reads into memory of its own.
    async fn bring(
        &self,
        connection: &Connection,
        segments: Vec<Segment>,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Buffer, String> {
        let late = || format!("no memory for a read within {} ms", self.timeout.as_millis());
        let buffer = tokio::time::timeout_at(deadline.into(), self.landing.take_when_free(bytes)).await;
        let buffer = buffer.map_err(|_| late())?.ok_or_else(|| format!("a read of {bytes} bytes is too large"))?;
        let left = deadline.saturating_duration_since(Instant::now());
        self.engine.read(connection.peer, segments, buffer, left).await.map_err(|error| {
            if !matches!(error, ReadError::OutOfBounds { .. }) {
                connection.failed.store(true, Ordering::Relaxed);
            }
            format!("prefill node {}: {error}", self.address)
        })
    }

    /// Reads a batch, then the epochs of its requests; gives the answer of each part, `None` where the blocks were not lent
    /// any more.
    async fn serve(&self, batch: Batch, deadline: Instant) -> Vec<(usize, Option<ReadResult>)> {
        let Batch { parts, segments, bytes } = batch;
        let Some((_, LentBlocks { connection, .. }, _)) = parts.first().map(|(i, lent, range)| (i, &**lent, range))
        else {
            return Vec::new();
        };
        let word = size_of::<u64>();
        let epoch = |(index, (_, lent, _)): (usize, &(usize, Arc<LentBlocks>, _))| Segment {
            local: index * word,
            remote: lent.places.epoch_at,
            len: word,
        };
        let read = async {
            let landed = self.bring(connection, segments, bytes, deadline).await?;
            let epochs = parts.iter().enumerate().map(epoch).collect();
            let epochs = self.bring(connection, epochs, parts.len() * word, deadline).await?;
            Ok::<_, String>((landed, epochs))
        };
        let (landed, epochs) = match read.await {
            Ok(read) => read,
            Err(error) => return parts.iter().map(|(index, ..)| (*index, Some(Err(error.clone())))).collect(),
        };
        let memory: Arc<dyn HostBytes> = Arc::new(Landed(landed));
        let answer = |((index, lent, range), epoch): ((usize, Arc<LentBlocks>, _), &[u8])| {
            let is_lent = epoch == lent.places.epoch.to_le_bytes();
            (index, is_lent.then(|| Ok(HostEntry { memory: memory.clone(), range })))
        };
        parts.into_iter().zip(epochs.bytes().chunks_exact(word)).map(answer).collect()
    }

    /// Why blocks are lent no more, as the session knows it.
    async fn reason(&self, part: &BlockRead) -> String {
        let nothing = BlockRead { request: part.request, layer: part.layer, blocks: Vec::new() };
        let answer = self.session.read(vec![nothing]).await.pop();
        answer.and_then(Result::err).unwrap_or_else(|| "the prefill node has taken the blocks back".to_owned())
    }
}

#[async_trait]
impl BlockReader for OneSidedReader {
    async fn granted(&self, request: RequestId, block_bytes: usize, lent: Option<&Lent>) -> Result<(), String> {
        let Some(Lent { pool, places }) = lent else {
            return Err("expected the places of the blocks, found none".to_owned());
        };
        let connection = self.connect(pool).await.map_err(|error| format!("prefill node {}: {error}", self.address))?;
        let blocks = LentBlocks { places: places.clone(), block_bytes, connection };
        self.lent().insert(request.0, Arc::new(blocks));
        Ok(())
    }

    async fn read(&self, parts: Vec<BlockRead>) -> Vec<ReadResult> {
        let deadline = Instant::now() + self.timeout;
        let mut answers: Vec<ReadResult> = vec![Err("not read".to_owned()); parts.len()];
        let mut batches = BTreeMap::new();
        for (index, part) in parts.iter().enumerate() {
            if let Err(problem) = self.plan(index, part, &mut batches) {
                answers[index] = Err(problem);
            }
        }
        for batch in batches.into_values() {
            for (index, answer) in self.serve(batch, deadline).await {
                answers[index] = match answer {
                    Some(answer) => answer,
                    None => Err(self.reason(&parts[index]).await),
                };
            }
        }
        answers
    }

    fn release(&self, request: RequestId) {
        self.lent().remove(&request.0);
        self.session.release(request);
    }
}
