//! The full KV in a store that the device does not address: the host carries entries both ways.
//!
//! A request's blocks have addresses of no memory, so that selections name them as they do where the device gathers by
//! itself. The host reads the lists of a step back when it is through, asks the store for what they name, and completes
//! a layer's transfer when the next step comes to that layer: reads overlap with the layers before.

mod spans;

use super::memory::SparseMemory;
use super::options::SparseOptions;
use super::parts::Parts;
use super::plan::Extent;
use super::programs::SparsePrograms;
use super::reading::LAYERS_AHEAD;
use super::step::HostLayers;
use crate::device::{Device, DeviceError, Event, PinnedBuffer, Stream};
use crate::kernels::{Address, CopyList, EntryCopy, GatherParams};
use crate::layout::entry_bytes;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId};
use oasis_core::memory::{BlockWrite, EntryKey, FetchedEntries, KvStore, Reservation, StoreError, StoreUsage};
use spans::{Completed, Spans, Work};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

/// Layers of a prompt that lie between device and store at a time.
pub(super) const BOUNCES: usize = LAYERS_AHEAD + 1;
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
    bounce_bytes: usize,
    /// Layers of the prompt under way that are in the store.
    stored: usize,
    places: [Place; 2],
    headers: PinnedBuffer,
    landing: PinnedBuffer,
    /// Completed blocks of one layer, `[rows][kv_heads]` entries.
    tails: PinnedBuffer,
    pending: Vec<Pending>,
    failures: BTreeMap<usize, String>,
}

impl StoreLink {
    /// Pinned bytes that lie between device and store.
    pub fn pinned_bytes(geometry: &KvGeometry, extent: Extent, rows: usize, cap: usize) -> usize {
        let entry = entry_bytes(geometry.head_dim);
        let heads = rows * geometry.kv_heads;
        BOUNCES * extent.blocks * geometry.kv_heads * entry + heads * entry * (2 * cap.min(extent.slots) + 1)
    }

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
            bounce_bytes,
            stored: 0,
            places: [place()?, place()?],
            headers: pinned(geometry.layers * HEADER)?,
            landing: pinned(copies)?,
            tails: pinned(heads * entry)?,
            pending: (0..geometry.layers).map(|_| Pending::default()).collect(),
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
        self.spans.remove(request);
        self.store.release(request);
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

impl Parts {
    /// Copies a prompt's layer from the device to its place on the way to the store.
    pub fn copy_to_bounce(&self, layer: usize, from: Address, bytes: usize) -> Result<(), DeviceError> {
        let Some(link) = &self.store_link else { return Ok(()) };
        let link = link.borrow();
        let start = layer % BOUNCES * link.bounce_bytes;
        for (at, part) in link.bounce.parts(start, bytes) {
            let to = link.bounce.address().offset(start + at);
            // SAFETY: the layer that used the place before is in the store; the entries are not changed before the copy
            // is done.
            unsafe { self.streams.offload.copy(to, from.offset(at), part)? };
        }
        Ok(())
    }

    /// Brings a layer's full KV from the store, in front of a first decode step.
    pub fn fetch_layer(&self, from: HostLayers, layer: usize, to: Address) -> Result<(), DeviceError> {
        let Some(link) = &self.store_link else { return Ok(()) };
        let link = &mut *link.borrow_mut();
        if let Some(before) = layer.checked_sub(BOUNCES) {
            // Its place is used again.
            self.events.copied[before].synchronize()?;
        }
        let entry = entry_bytes(link.geometry.head_dim);
        let start = from.address.offset(layer * from.stride);
        let entries = (0..from.bytes / entry).filter_map(|index| link.spans.entry_at(start.offset(index * entry)));
        let (rows, keys): (Vec<usize>, Vec<EntryKey>) = entries.unzip();
        let Some(&row) = rows.first() else { return Ok(()) };
        match link.runtime.block_on(link.store.fetch(&keys)) {
            Ok(fetched) => {
                let place = &mut link.bounce.as_mut_slice()[layer % BOUNCES * link.bounce_bytes..][..from.bytes];
                let entries = place.chunks_exact_mut(entry).zip(&fetched.entries);
                entries.for_each(|(place, entry)| place.copy_from_slice(entry.bytes()));
            }
            Err(error) => {
                link.failures.entry(row).or_insert_with(|| error.to_string());
            }
        }
        let start = layer % BOUNCES * link.bounce_bytes;
        for (at, part) in link.bounce.parts(start, from.bytes) {
            let from = link.bounce.address().offset(start + at);
            // SAFETY: the place in `staging` was waited for; the bounce is not written before this layer is copied.
            unsafe { self.streams.offload.copy(to.offset(at), from, part)? };
        }
        Ok(())
    }

    /// Reads the lists of the last step back, stores the blocks that it completed and asks for those that it admitted.
    /// Nothing of that step is under way any more.
    pub fn begin_transfers(&self, sparse: &SparseMemory) -> Result<(), DeviceError> {
        let Some(link) = &self.store_link else { return Ok(()) };
        let link = &mut *link.borrow_mut();
        let (stream, bytes) = (&self.streams.transfer, link.headers.as_slice().len());
        // SAFETY: both sides have one header a layer.
        unsafe { stream.copy(link.headers.address(), sparse.lists.address(), bytes)? };
        stream.synchronize()?;
        let counts: Vec<usize> = (link.headers.as_slice().chunks_exact(HEADER))
            .map(|header| bytemuck::pod_read_unaligned::<CopyList>(header).count as usize)
            .collect();
        for (layer, count) in counts.into_iter().enumerate() {
            self.begin_layer(link, sparse, layer, count, stream)?;
        }
        Ok(())
    }

    fn begin_layer(
        &self,
        link: &mut StoreLink,
        sparse: &SparseMemory,
        layer: usize,
        count: usize,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let (copies, bytes) = (sparse.layers[layer].copies.address(), count * COPY);
        for (at, part) in link.landing.parts(0, bytes) {
            // SAFETY: a list has no more copies than the landing has room for.
            unsafe { stream.copy(link.landing.address().offset(at), copies.offset(at), part)? };
        }
        if count > 0 {
            stream.synchronize()?;
        }
        let mut work = link.spans.sort(bytemuck::cast_slice(&link.landing.as_slice()[..bytes]));
        self.store_completed(link, layer, std::mem::take(&mut work.stores), stream)?;
        link.begin(layer, work);
        Ok(())
    }

    fn store_completed(
        &self,
        link: &mut StoreLink,
        layer: usize,
        stores: BTreeMap<Completed, Vec<(KvHead, Address)>>,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let (entry, block_bytes) = (entry_bytes(link.geometry.head_dim), link.geometry.block_bytes());
        for (index, entries) in stores.values().enumerate() {
            for (head, from) in entries {
                let start = index * block_bytes + head.index() * entry;
                for (at, part) in link.tails.parts(start, entry) {
                    // SAFETY: a row completes one block a step, and there is room for one of every row.
                    unsafe { stream.copy(link.tails.address().offset(start + at), from.offset(at), part)? };
                }
            }
        }
        if stores.is_empty() {
            return Ok(());
        }
        stream.synchronize()?;
        for (index, (row, request, block)) in stores.into_keys().enumerate() {
            let bytes = &link.tails.as_slice()[index * block_bytes..][..block_bytes];
            if let Err(error) = link.put(request, layer, &[BlockWrite { block, bytes }]) {
                link.failures.entry(row).or_insert_with(|| error.to_string());
            }
        }
        Ok(())
    }

    /// Completes a layer's transfer on `stream`: what the store brought goes to its slots.
    pub fn complete_transfer(
        &self,
        sparse: &SparseMemory,
        programs: &SparsePrograms,
        layer: usize,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let (Some(link), Some(ctas)) = (&self.store_link, self.gather_ctas()) else { return Ok(()) };
        let link = &mut *link.borrow_mut();
        let (count, place) = link.complete(layer)?;
        let (list, copies) = (sparse.list(layer), sparse.layers[layer].copies.address());
        for (at, part) in place.list.parts(COPY, count * COPY) {
            // SAFETY: both sides have room for every slot and two copies a head; the list that it replaces is carried out
            // by this one.
            unsafe { stream.copy(copies.offset(at), place.list.address().offset(COPY + at), part)? };
        }
        // SAFETY: the count is the first number of a list, on both sides.
        unsafe { stream.copy(list, place.list.address(), size_of::<u32>())? };
        let params = GatherParams { list, copies };
        // SAFETY: sources are pinned entries that stay until `done`, or device memory that selection named.
        unsafe { programs.gather.launch(stream, (ctas, 1), &params)? };
        stream.record(&place.done)
    }

    /// All of a layer's transfer at once, after what `stream` has been given so far.
    pub fn transfer_now(
        &self,
        sparse: &SparseMemory,
        programs: &SparsePrograms,
        layer: usize,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let Some(link) = &self.store_link else { return Ok(()) };
        let count = {
            let link = &mut *link.borrow_mut();
            // SAFETY: the landing begins with room for a header.
            unsafe { stream.copy(link.headers.address(), sparse.list(layer), HEADER)? };
            stream.synchronize()?;
            let header = bytemuck::pod_read_unaligned::<CopyList>(&link.headers.as_slice()[..HEADER]);
            self.begin_layer(link, sparse, layer, header.count as usize, stream)?;
            header.count
        };
        if count == 0 {
            return Ok(());
        }
        self.complete_transfer(sparse, programs, layer, stream)
    }

    /// Stores the block that a row's first step has completed; its entries lie in the tails.
    pub fn store_tails(&self, request: RequestId, row: usize, block: usize) -> Result<(), DeviceError> {
        let (Some(link), Some(sparse)) = (&self.store_link, &self.memory.sparse) else { return Ok(()) };
        let link = &mut *link.borrow_mut();
        let (kv_heads, entry) = (link.geometry.kv_heads, entry_bytes(link.geometry.head_dim));
        for (layer, sets) in sparse.layers.iter().enumerate() {
            let tail = |head: usize| sets.tail.address().offset(((row * kv_heads + head) * 2 + block % 2) * entry);
            let entries = (0..kv_heads).map(|head| (KvHead::from(head), tail(head))).collect();
            let stores = BTreeMap::from([((row, request, BlockId::from(block)), entries)]);
            self.store_completed(link, layer, stores, &self.streams.foreground)?;
        }
        Ok(())
    }
}
