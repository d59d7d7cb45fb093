//! Stores: where the full KV of requests lives.

use crate::geometry::KvGeometry;
use crate::ids::{BlockId, KvHead, LayerId, RequestId};
use crate::policy::SpecError;
use async_trait::async_trait;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Name of one entry: keys and values of one block and one KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EntryKey {
    /// Request.
    pub request: RequestId,
    /// Layer.
    pub layer: LayerId,
    /// Block.
    pub block: BlockId,
    /// KV head.
    pub head: KvHead,
}

/// A block to be written: entries of all KV heads of one (request, layer, block).
#[derive(Debug, Clone, Copy)]
pub struct BlockWrite<'a> {
    /// Block.
    pub block: BlockId,
    /// `[kv_heads][entry_bytes]`, in the layout of [`LAYOUT_VERSION`](crate::geometry::LAYOUT_VERSION).
    pub bytes: &'a [u8],
}

/// Host memory that a store lends out: kept alive, unchanged, until the last holder drops it.
pub trait HostBytes: Send + Sync {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

impl HostBytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// One entry in host memory.
#[derive(Clone)]
pub struct HostEntry {
    /// Memory that holds the entry, usually a whole block.
    pub memory: Arc<dyn HostBytes>,
    /// The entry within it.
    pub range: Range<usize>,
}

impl HostEntry {
    /// Bytes of the entry.
    pub fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[self.range.clone()]
    }
}

impl From<Vec<u8>> for HostEntry {
    /// All of `memory`.
    fn from(memory: Vec<u8>) -> Self {
        Self { range: 0..memory.len(), memory: Arc::new(memory) }
    }
}

/// Entries readable in host memory, in the order they were asked for.
///
/// Holding them is a lease: the memory is not reused while this lives, even when the request is released meanwhile.
#[derive(Clone, Default)]
pub struct FetchedEntries {
    /// One an asked key.
    pub entries: Vec<HostEntry>,
}

/// Answer to a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reservation {
    /// The blocks are set aside for the request.
    Granted,
    /// Not now: others hold the space. An ordinary answer; the request waits.
    Full {
        /// Bytes asked for.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// Never: more than the whole store.
    TooLarge {
        /// Bytes asked for.
        needed: u64,
        /// Bytes of the whole store.
        capacity: u64,
    },
}

/// How full a store is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreUsage {
    /// Most bytes it may hold.
    pub capacity: u64,
    /// Bytes set aside by reservations.
    pub reserved: u64,
    /// Bytes of blocks written and not released.
    pub used: u64,
    /// Requests with a reservation.
    pub requests: usize,
}

/// What fetches have cost so far, in a store with a fast and a slow medium.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreMetrics {
    /// Entries that were in host memory when they were asked for.
    pub hits: u64,
    /// Entries that came from the slow medium.
    pub misses: u64,
    /// Time that fetches waited for the slow medium, added up over fetches that ran at the same time.
    pub stall: Duration,
}

/// Why a store operation failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The entry was never written, or its request was released.
    #[error("request {}, layer {}, block {}, KV head {}: not in the store", .0.request, .0.layer, .0.block, .0.head)]
    Missing(EntryKey),
    /// A write without a reservation, or beyond it.
    #[error("request {request}, layer {layer}, block {block}: {problem}")]
    Refused {
        /// Request.
        request: RequestId,
        /// Layer.
        layer: LayerId,
        /// Block.
        block: BlockId,
        /// What is wrong.
        problem: String,
    },
    /// The medium failed or returned something other than what was written.
    #[error("{operation}: {problem}")]
    Medium {
        /// What was being done.
        operation: &'static str,
        /// What went wrong.
        problem: String,
    },
}

/// Holds the full KV of requests, block by block.
///
/// Obligations:
/// - `reserve` is called once a request, before any `put`; running out of space is an answer, not an error.
/// - Entries are aligned for their element type.
/// - A block is visible to `fetch` only once its `put` has completed, and is never changed afterwards.
/// - `release` may be called in any state and any number of times; later reads of the request fail with
///   [`StoreError::Missing`], reads in flight keep their memory.
#[async_trait]
pub trait KvStore: Send + Sync {
    /// Capacity and use.
    fn usage(&self) -> StoreUsage;

    /// What fetches have cost so far; zeros where all KV is in host memory.
    fn metrics(&self) -> StoreMetrics {
        StoreMetrics::default()
    }

    /// Sets aside space for `blocks` blocks of every layer.
    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation;

    /// Writes blocks of one layer.
    ///
    /// # Errors
    /// [`StoreError::Refused`] without a reservation, beyond it, or when a block has the wrong length or exists.
    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError>;

    /// Brings entries into host memory, in the order of `keys`.
    ///
    /// # Errors
    /// [`StoreError::Missing`] for an entry that is not there; then nothing is returned.
    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError>;

    /// Gives back everything of a request.
    fn release(&self, request: RequestId);
}

/// Configuration of a [`KvStore`], found by its `kind`.
#[typetag::serde(tag = "kind")]
pub trait StoreSpec: std::fmt::Debug + Send + Sync {
    /// Opens the store.
    ///
    /// # Errors
    /// Names the field that has an impossible value.
    fn build(&self) -> Result<Arc<dyn KvStore>, SpecError>;

    /// Bytes of host memory, where the store is nothing but that: a device which addresses host memory itself keeps the
    /// blocks there and needs no [`KvStore`] object.
    fn host_memory(&self) -> Option<u64> {
        None
    }
}
