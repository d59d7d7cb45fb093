//! What a store knows: live requests, their blocks, leftovers.

use super::folder::{Leftover, RequestFile};
use super::record::{Layout, Owner};
use crate::disk::Pages;
use oasis_core::ids::RequestId;
use oasis_core::memory::EntryKey;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

#[derive(Default)]
pub(super) struct State {
    pub requests: HashMap<RequestId, Live>,
    /// Bytes of the files of live requests.
    pub reserved: u64,
    /// Bytes of written records.
    pub used: u64,
    /// Of the request that was reserved last.
    pub generation: u64,
    /// The longest unused first.
    pub leftovers: VecDeque<Leftover>,
    /// Writes that failed and wait for another try.
    pub failed: Vec<RecordName>,
    /// What the disk said to the last failed write, as long as none has succeeded since.
    pub problem: Option<String>,
}

/// A record of a request that may have been released meanwhile.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecordName {
    pub request: RequestId,
    pub generation: u64,
    pub record: usize,
}

/// A request with a reservation.
pub(super) struct Live {
    pub owner: Owner,
    pub layout: Layout,
    /// Its file, or why there is none.
    pub file: Result<Arc<RequestFile>, String>,
    /// `[records]`
    pub is_written: Vec<bool>,
    /// Of written records. `[records][kv_heads]`
    pub checksums: Vec<u64>,
    /// Written records that are not on the disk yet.
    pub dirty: HashMap<usize, Dirty>,
}

/// A record that waits for the disk, with its place in the write buffer.
pub(super) struct Dirty {
    pub pages: Arc<Pages>,
    #[expect(dead_code, reason = "given back by being dropped")]
    pub place: Option<OwnedSemaphorePermit>,
}

impl Live {
    pub fn new(owner: Owner, layout: Layout, file: Result<Arc<RequestFile>, String>) -> Self {
        let (records, kv_heads) = (layout.records(), layout.geometry.kv_heads);
        Self {
            owner,
            layout,
            file,
            is_written: vec![false; records],
            checksums: vec![0; records * kv_heads],
            dirty: HashMap::new(),
        }
    }

    /// Bytes of written records.
    pub fn used_bytes(&self) -> u64 {
        let written = self.is_written.iter().filter(|&&is_written| is_written).count();
        written as u64 * self.layout.record_bytes() as u64
    }

    pub fn set_written(&mut self, record: usize, checksums: &[u64]) {
        self.is_written[record] = true;
        let kv_heads = self.layout.geometry.kv_heads;
        self.checksums[record * kv_heads..(record + 1) * kv_heads].copy_from_slice(checksums);
    }

    /// Record and head of an entry, when it is written.
    pub fn find(&self, key: &EntryKey) -> Option<(usize, usize)> {
        let Layout { geometry, blocks } = &self.layout;
        let is_inside =
            key.layer.index() < geometry.layers && key.block.index() < *blocks && key.head.index() < geometry.kv_heads;
        let record = is_inside.then(|| self.layout.record(key.layer, key.block))?;
        self.is_written[record].then_some((record, key.head.index()))
    }
}

impl State {
    pub fn leftover_bytes(&self) -> u64 {
        self.leftovers.iter().map(|leftover| leftover.bytes).sum()
    }

    /// The live request that a record belongs to.
    pub fn live(&mut self, name: RecordName) -> Option<&mut Live> {
        self.requests.get_mut(&name.request).filter(|live| live.owner.generation == name.generation)
    }
}
