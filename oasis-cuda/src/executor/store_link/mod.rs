//! The full KV in a store that the device does not address: the host carries entries both ways.
//!
//! A request's blocks have addresses of no memory, so that selections name them as they do where the device gathers by
//! itself. The host reads the lists of a step back when it is through, asks the store for what they name, and completes
//! a layer's transfer when the next step comes to that layer: reads overlap with the layers before.

mod carry;
mod spans;

use super::options::SparseOptions;
use super::plan::{BOUNCES, Extent, RETURNS};
use crate::device::{Device, DeviceError, Event, PinnedBuffer};
use crate::kernels::{Address, CopyList, EntryCopy};
use crate::layout::entry_bytes;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, LayerId, RequestId};
use oasis_core::memory::{BlockWrite, EntryKey, FetchedEntries, KvStore, Reservation, StoreError, StoreUsage};
use spans::{Spans, Work};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

const HEADER: usize = size_of::<CopyList>();
const COPY: usize = size_of::<EntryCopy>();

/// A row's entries on their way out of the store.
struct Job {
    row: usize,
    to: Vec<Address>,
    task: JoinHandle<Result<FetchedEntries, StoreError>>,
}

/// A layer's transfer between two steps.
#[derive(Default)]
struct Pending {
    jobs: Vec<Job>,
    inside: Vec<EntryCopy>,
}

/// Pinned memory of one layer's transfer, used by every second layer.
struct Place {
    entries: PinnedBuffer,
    /// A count, then copies.
    list: PinnedBuffer,
    /// The transfer that used it last is done.
    done: Event,
}

/// The store and what lies between it and the device.
pub(super) struct StoreLink {
    store: Arc<dyn KvStore>,
    runtime: Runtime,
    geometry: KvGeometry,
    spans: Spans,
    /// Layers of a prompt, `[BOUNCES]`.
    bounce: PinnedBuffer,
    /// Layers of a full KV on their way back, `[RETURNS]`: a prompt of another request may lie in `bounce` meanwhile.
    returning: PinnedBuffer,
    /// Bytes of a layer in either.
    bounce_bytes: usize,
    /// Layers of the prompt under way that are in the store.
    stored: usize,
    places: [Place; 2],
    headers: PinnedBuffer,
    landing: PinnedBuffer,
    /// Completed blocks of one layer, `[rows][kv_heads]` entries.
    tails: PinnedBuffer,
    pending: Vec<Pending>,
    /// Admissions a KV head that there is room for.
    most: usize,
    failures: BTreeMap<usize, String>,
}

impl StoreLink {
    pub fn new(
        device: &Device,
        store: Arc<dyn KvStore>,
        options: &SparseOptions,
        (geometry, extent, rows): (KvGeometry, Extent, usize),
    ) -> Result<Self, DeviceError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("oasis-store")
            .enable_all()
            .build()
            .map_err(|error| DeviceError::new("starting threads for the store", error))?;
        let (heads, entry) = (rows * geometry.kv_heads, entry_bytes(geometry.head_dim));
        let pinned = |bytes| device.pinned(bytes, &|_| ());
        let copies = heads * (extent.slots + 2) * COPY;
        let place = || {
            let entries = pinned(heads * options.cap.min(extent.slots) * entry)?;
            Ok::<_, DeviceError>(Place { entries, list: pinned(COPY + copies)?, done: device.event()? })
        };
        let bounce_bytes = extent.blocks * geometry.kv_heads * entry;
        Ok(Self {
            store,
            runtime,
            geometry,
            spans: Spans::new(geometry),
            bounce: pinned(BOUNCES * bounce_bytes)?,
            returning: pinned(RETURNS * bounce_bytes)?,
            bounce_bytes,
            stored: 0,
            places: [place()?, place()?],
            headers: pinned(geometry.layers * HEADER)?,
            landing: pinned(copies)?,
            tails: pinned(heads * entry)?,
            pending: (0..geometry.layers).map(|_| Pending::default()).collect(),
            most: options.cap,
            failures: BTreeMap::new(),
        })
    }

    /// Sets room for `blocks` blocks a layer aside.
    pub fn reserve(&mut self, request: RequestId, row: usize, blocks: usize) -> Reservation {
        let answer = self.store.reserve(request, &self.geometry, blocks);
        if answer == Reservation::Granted {
            self.spans.add(request, row, blocks);
        }
        answer
    }

    /// Where a request's blocks seem to lie.
    pub fn address(&self, request: RequestId) -> Option<Address> {
        self.spans.address(request)
    }

    pub fn release(&mut self, request: RequestId) {
        self.forget(request);
        self.store.release(request);
    }

    /// A request goes; its blocks stay in the store.
    pub fn forget(&mut self, request: RequestId) {
        if let Some(row) = self.spans.remove(request) {
            // They are not the next request's.
            self.failures.remove(&row);
        }
    }

    /// Why a row's entries could not be brought or stored.
    pub fn failure(&self, row: usize) -> Option<String> {
        self.failures.get(&row).cloned()
    }

    /// Most admissions of a KV head in a step.
    pub fn most(&self) -> usize {
        self.most
    }

    pub fn usage(&self) -> StoreUsage {
        self.store.usage()
    }

    /// Rows whose entries could not be brought or stored, and why.
    pub fn take_failures(&mut self) -> BTreeMap<usize, String> {
        std::mem::take(&mut self.failures)
    }

    /// Asks the store for a layer's entries.
    fn begin(&mut self, layer: usize, work: Work) {
        let jobs = work.fetches.into_iter().map(|(row, entries)| {
            let (keys, to): (Vec<EntryKey>, _) = entries.into_iter().unzip();
            let store = self.store.clone();
            Job { row, to, task: self.runtime.spawn(async move { store.fetch(&keys).await }) }
        });
        self.pending[layer] = Pending { jobs: jobs.collect(), inside: work.inside };
    }

    /// Waits for a layer's entries and writes a list of copies from where they are now; gives the number of copies and the
    /// place that they and the list lie in. Rows whose entries do not come fail.
    fn complete(&mut self, layer: usize) -> Result<(usize, &Place), DeviceError> {
        let Pending { jobs, inside } = std::mem::take(&mut self.pending[layer]);
        let place = &mut self.places[layer % 2];
        place.done.synchronize()?;
        let entry = entry_bytes(self.geometry.head_dim);
        let from = place.entries.address();
        let (mut memory, mut copies) = (place.entries.as_mut_slice().chunks_exact_mut(entry).enumerate(), inside);
        for Job { row, to, task } in jobs {
            let fetched = match self.runtime.block_on(task) {
                Ok(Ok(fetched)) => fetched,
                Ok(Err(error)) => {
                    self.failures.entry(row).or_insert_with(|| error.to_string());
                    continue;
                }
                Err(panic) => {
                    self.failures.entry(row).or_insert_with(|| format!("the store panicked: {panic}"));
                    continue;
                }
            };
            for (entry, to) in fetched.entries.iter().zip(to) {
                let (index, place) = memory.next().expect("a row brings no more entries than the cap allows");
                place.copy_from_slice(entry.bytes());
                copies.push(EntryCopy { from: from.offset(index * place.len()), to });
            }
        }
        let list = place.list.as_mut_slice();
        list[..4].copy_from_slice(&(copies.len() as u32).to_ne_bytes());
        list[COPY..][..copies.len() * COPY].copy_from_slice(bytemuck::cast_slice(&copies));
        Ok((copies.len(), place))
    }

    fn put(&self, request: RequestId, layer: usize, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        self.runtime.block_on(self.store.put(request, LayerId::from(layer), blocks))
    }

    /// A prompt begins: none of its layers is stored.
    pub fn begin_prompt(&mut self) {
        self.stored = 0;
    }

    /// Layers of the prompt under way that are in the store: their places between device and store are free.
    pub fn stored(&self) -> usize {
        self.stored
    }

    /// Stores the next layer of a prompt, which has been copied to its place.
    ///
    /// # Errors
    /// The store's.
    pub fn store_layer(&mut self, request: RequestId, blocks: usize) -> Result<(), StoreError> {
        let (layer, bytes) = (self.stored, self.geometry.block_bytes());
        let memory = &self.bounce.as_slice()[layer % BOUNCES * self.bounce_bytes..][..blocks * bytes];
        let writes = memory.chunks_exact(bytes).enumerate();
        let writes: Vec<_> = writes.map(|(block, bytes)| BlockWrite { block: BlockId::from(block), bytes }).collect();
        self.put(request, layer, &writes)?;
        self.stored += 1;
        Ok(())
    }
}
