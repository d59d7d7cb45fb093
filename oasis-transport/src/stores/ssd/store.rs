//! The store.

use super::folder::{Folder, Leftover, RequestFile, recover};
use super::read::{self, Wanted};
use super::record::{Layout, Owner};
use super::state::{Dirty, Live, RecordName};
use super::write::Shared;
use crate::disk::{self, Device, PAGE, PagePool};
use crate::stores::counters::Counters;
use crate::stores::rules::{self, unreserved};
use async_trait::async_trait;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, LayerId, RequestId};
use oasis_core::memory::{
    BlockWrite, EntryKey, FetchedEntries, HostEntry, KvStore, Reservation, StoreError, StoreMetrics, StoreUsage,
};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Free pages that are kept for reads to come.
const POOL_BYTES: u64 = 64 << 20;

/// An open [`Ssd`](super::Ssd). Its futures run in a tokio runtime with timers.
///
/// it waits for writes, at most as long as the deadline; files of requests that were not released stay
/// behind.
pub struct SsdStore {
    // Dropped first: nothing is moved any more when the folder is given up.
    pub(super) device: Arc<dyn Device>,
    pub(super) folder: Folder,
    pub(super) shared: Arc<Shared>,
    capacity: u64,
    deadline: Duration,
    pool: Arc<PagePool>,
    /// Free pages of the write buffer.
    pub(super) buffer: Arc<Semaphore>,
    pub(super) buffer_pages: usize,
    counters: Counters,
}

impl SsdStore {
    pub(super) fn new(
        folder: Folder,
        device: Arc<dyn Device>,
        capacity: u64,
        write_buffer: u64,
        deadline: Duration,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let mut state = shared.write();
        state.leftovers = folder.leftovers()?;
        // Never one that a file of this folder had, whatever became of that file.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        state.generation = state.leftovers.iter().map(|l| l.generation).fold(now, u64::max);
        drop(state);
        let buffer_pages = (write_buffer as usize / PAGE).min(Semaphore::MAX_PERMITS).min(u32::MAX as usize);
        let store = Self {
            device,
            folder,
            shared,
            capacity,
            deadline,
            pool: PagePool::new(POOL_BYTES.saturating_add(write_buffer)),
            buffer: Arc::new(Semaphore::new(buffer_pages)),
            buffer_pages,
            counters: Counters::default(),
        };
        store.make_room();
        Ok(store)
    }

    /// What requests of earlier runs left behind, the longest unused first. It goes when its room is needed.
    pub fn leftovers(&self) -> Vec<Leftover> {
        self.shared.read().leftovers.iter().cloned().collect()
    }

    /// Makes a leftover the KV of the live request `request`; the blocks that it has. Others of its reservation may be
    /// put. Reads and checks the whole file before it returns.
    ///
    /// # Errors
    /// [`StoreError::Medium`] when there is no such leftover, the room is reserved by others, the request has a
    /// reservation already, or the disk fails.
    pub fn adopt(&self, generation: u64, request: RequestId) -> Result<Vec<(LayerId, BlockId)>, StoreError> {
        let failed = |problem: String| StoreError::Medium { operation: "adopt", problem };
        let leftover = {
            let mut state = self.shared.write();
            let found = state.leftovers.iter().position(|l| l.generation == generation);
            let Some(index) = found else { return Err(failed(format!("no leftover has generation {generation}"))) };
            let bytes = state.leftovers[index].bytes;
            if state.requests.contains_key(&request) {
                return Err(failed(format!("request {request} has a reservation already")));
            }
            if bytes > self.capacity - state.reserved {
                return Err(failed(format!("{bytes} bytes needed, {} free", self.capacity - state.reserved)));
            }
            state.reserved += bytes;
            state.leftovers.remove(index).expect("it was found there")
        };
        let layout = leftover.layout();
        let recovered = self.folder.reopen(&*self.device, leftover.owner()).and_then(|file| {
            let records = recover(&file, &layout)?;
            Ok((file, records))
        });
        let mut state = self.shared.write();
        let (file, records) = match recovered {
            Ok(recovered) => recovered,
            Err(error) => {
                state.reserved -= leftover.bytes;
                state.leftovers.push_back(leftover);
                return Err(failed(error.to_string()));
            }
        };
        let mut live = Live::new(leftover.owner(), layout, Ok(file));
        let mut blocks = Vec::new();
        for (record, checksums) in records.into_iter().enumerate() {
            if let Some(checksums) = checksums {
                live.set_written(record, &checksums);
                blocks.push(layout.name(record));
            }
        }
        state.used += live.used_bytes();
        state.requests.insert(request, live);
        Ok(blocks)
    }

    /// Takes leftovers away until all files fit the capacity.
    fn make_room(&self) {
        loop {
            let mut state = self.shared.write();
            if state.reserved + state.leftover_bytes() <= self.capacity {
                return;
            }
            let oldest = state.leftovers.pop_front().expect("live requests fit the capacity");
            drop(state);
            self.folder.remove_leftover(&oldest);
        }
    }

    /// Makes a request's file. Where the disk is full, leftovers go first.
    fn create(&self, owner: Owner, layout: &Layout) -> io::Result<Arc<RequestFile>> {
        let mut is_tidy = false;
        loop {
            let result = self.folder.create(&*self.device, owner, layout);
            if !result.as_ref().is_err_and(is_full) {
                return result;
            }
            let oldest = self.shared.write().leftovers.pop_front();
            match oldest {
                Some(leftover) => self.folder.remove_leftover(&leftover),
                // Released files may be on their way out.
                None if !is_tidy => {
                    is_tidy = true;
                    self.folder.tidy();
                }
                None => return result,
            }
        }
    }

    /// Waits for room in the write buffer.
    async fn room(&self, pages: usize) -> Result<OwnedSemaphorePermit, StoreError> {
        // More than the whole buffer is written when nothing else waits.
        let pages = pages.min(self.buffer_pages) as u32;
        if let Ok(room) = self.buffer.clone().try_acquire_many_owned(pages) {
            return Ok(room);
        }
        let failed = |problem: String| StoreError::Medium { operation: "put", problem };
        let mut failure = std::pin::pin!(self.shared.failure.notified());
        failure.as_mut().enable();
        self.shared.retry(&self.device);
        tokio::select! {
            biased;
            room = self.buffer.clone().acquire_many_owned(pages) => Ok(room.expect("it is never closed")),
            () = failure => {
                let problem = self.shared.read().problem.clone().unwrap_or_default();
                Err(failed(format!("the write buffer is full of blocks that the disk does not take: {problem}")))
            }
            () = tokio::time::sleep(self.deadline) => {
                Err(failed(format!("the disk made no room in the write buffer within {:?}", self.deadline)))
            }
        }
    }

    /// Entries in memory, and those that must be read.
    fn look_up(&self, keys: &[EntryKey]) -> Result<(Vec<Option<HostEntry>>, Vec<Wanted>), StoreError> {
        let state = self.shared.read();
        let (mut entries, mut wanted) = (Vec::with_capacity(keys.len()), Vec::new());
        for (index, &key) in keys.iter().enumerate() {
            let found = state.requests.get(&key.request).and_then(|live| Some((live, live.find(&key)?)));
            let (live, (record, head)) = found.ok_or(StoreError::Missing(key))?;
            let layout = live.layout;
            if let Some(dirty) = live.dirty.get(&record) {
                let start = layout.entry_offset(head);
                let range = start..start + layout.geometry.entry_bytes();
                entries.push(Some(HostEntry { memory: dirty.pages.clone(), range }));
                continue;
            }
            let checksum = live.checksums[record * layout.geometry.kv_heads + head];
            let file = live.file.as_ref().expect("what is on the disk has a file").clone();
            wanted.push(Wanted { index, file, layout, record, head, checksum });
            entries.push(None);
        }
        Ok((entries, wanted))
    }

    /// Reads `wanted` to their places in `entries`.
    async fn read(&self, wanted: Vec<Wanted>, entries: &mut [Option<HostEntry>]) -> Result<(), String> {
        let (sender, mut done) = tokio::sync::mpsc::unbounded_channel();
        let reads = read::join(wanted);
        disk::submit(&self.device, read::ops(&reads, &self.pool, &sender));
        drop(sender);
        let mut reads: Vec<_> = reads.into_iter().map(Some).collect();
        while let Some(part) = done.recv().await {
            for (number, memory, result) in part {
                let read = reads[number].take().expect("a read ends once");
                for (index, entry) in read.finish(memory, result)? {
                    entries[index] = Some(entry);
                }
            }
        }
        if reads.iter().any(Option::is_some) { Err("the disk was given up".to_owned()) } else { Ok(()) }
    }
}

/// The file system has no room.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[async_trait]
impl KvStore for SsdStore {
    fn usage(&self) -> StoreUsage {
        let state = self.shared.read();
        StoreUsage {
            capacity: self.capacity,
            reserved: state.reserved,
            used: state.used,
            requests: state.requests.len(),
        }
    }

    fn metrics(&self) -> StoreMetrics {
        self.counters.metrics()
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        let layout = Layout { geometry: *geometry, blocks };
        let needed = layout.file_bytes();
        if needed > self.capacity {
            return Reservation::TooLarge { needed, capacity: self.capacity };
        }
        // A request that reserves again starts over.
        self.release(request);
        let owner = {
            let mut state = self.shared.write();
            let free = self.capacity - state.reserved;
            if needed > free {
                return Reservation::Full { needed, free };
            }
            state.reserved += needed;
            state.generation += 1;
            Owner { request: request.0, generation: state.generation }
        };
        self.make_room();
        // Not under the lock: reads go on while the file system works.
        let file = self.create(owner, &layout);
        let mut state = self.shared.write();
        let file = match file {
            Err(error) if is_full(&error) => {
                state.reserved -= needed;
                let free = self.folder.free_bytes().unwrap_or(0).min(needed - 1);
                // Nothing of ours will be released: it would wait for ever.
                let is_alone = state.reserved == 0;
                tracing::warn!("{}: {needed} bytes needed, the file system has {free}", self.folder.path().display());
                return if is_alone {
                    Reservation::TooLarge { needed, capacity: free }
                } else {
                    Reservation::Full { needed, free }
                };
            }
            // Its writes will say so.
            file => file.map_err(|error| format!("{}: no file for it: {error}", self.folder.path().display())),
        };
        state.requests.insert(request, Live::new(owner, layout, file));
        Reservation::Granted
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        let check = |live: &Live| {
            let Layout { geometry, blocks: reserved } = &live.layout;
            let exists = |block| live.is_written[live.layout.record(layer, block)];
            rules::check(geometry, *reserved, request, layer, blocks, exists)
        };
        let (file, layout) = {
            let state = self.shared.read();
            let live = state.requests.get(&request).ok_or_else(|| unreserved(request, layer, blocks))?;
            check(live)?;
            let failed = |problem: &String| StoreError::Medium { operation: "put", problem: problem.clone() };
            (live.file.as_ref().map_err(failed)?.clone(), live.layout)
        };
        let record_pages = layout.record_bytes() / PAGE;
        let mut room = self.room(record_pages * blocks.len()).await?;
        // Copied without the lock: reads go on meanwhile.
        let copies: Vec<_> = (blocks.iter())
            .map(|&BlockWrite { block, bytes }| {
                let (record, mut pages) = (layout.record(layer, block), self.pool.take(layout.record_bytes()));
                let checksums = layout.encode(file.owner, record, bytes, pages.bytes_mut());
                (record, Arc::new(pages), checksums)
            })
            .collect();

        let mut state = self.shared.write();
        // The request may have been released meanwhile, or another put of the same block may have come first.
        let name = RecordName { request, generation: file.owner.generation, record: 0 };
        let live = state.live(name).ok_or_else(|| unreserved(request, layer, blocks))?;
        check(live)?;
        let mut ops = Vec::with_capacity(copies.len());
        for (record, pages, checksums) in copies {
            live.set_written(record, &checksums);
            let place = room.split(record_pages.min(room.num_permits()));
            ops.push(self.shared.op(file.clone(), &layout, RecordName { record, ..name }, pages.clone()));
            live.dirty.insert(record, Dirty { pages, place });
        }
        state.used += (ops.len() * layout.record_bytes()) as u64;
        drop(state);
        disk::submit(&self.device, ops);
        Ok(())
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        let (mut entries, wanted) = self.look_up(keys)?;
        let misses = wanted.len();
        let mut stall = Duration::ZERO;
        if misses > 0 {
            let start = Instant::now();
            let read = tokio::time::timeout(self.deadline, self.read(wanted, &mut entries)).await;
            let late = |_| Err(format!("the disk did not return {misses} entries within {:?}", self.deadline));
            read.unwrap_or_else(late).map_err(|problem| StoreError::Medium { operation: "fetch", problem })?;
            stall = start.elapsed();
        }
        self.counters.count(keys.len() - misses, misses, stall);
        Ok(FetchedEntries { entries: entries.into_iter().map(|e| e.expect("all were read")).collect() })
    }

    fn release(&self, request: RequestId) {
        let released = {
            let mut state = self.shared.write();
            let released = state.requests.remove(&request);
            if let Some(live) = &released {
                state.reserved -= live.layout.file_bytes();
                state.used -= live.used_bytes();
            }
            released
        };
        if let Some(Live { file: Ok(file), dirty, .. }) = released {
            drop(dirty);
            self.folder.remove(file);
            // The disk may have room now.
            self.shared.retry(&self.device);
        }
    }
}

impl Drop for SsdStore {
    fn drop(&mut self) {
        self.shared.retry(&self.device);
        let end = Instant::now() + self.deadline;
        let waits = || {
            let state = self.shared.read();
            state.requests.values().map(|live| live.dirty.len()).sum::<usize>() > state.failed.len()
        };
        while waits() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}
