//! Entries on their way between the device and a store.

use super::spans::Completed;
use super::{COPY, HEADER, StoreLink};
use crate::device::{DeviceError, Stream};
use crate::executor::memory::SparseMemory;
use crate::executor::parts::Parts;
use crate::executor::plan::{BOUNCES, RETURNS};
use crate::executor::programs::SparsePrograms;
use crate::executor::scope::HostLayers;
use crate::kernels::{Address, CopyList, GatherParams};
use crate::layout::entry_bytes;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId};
use oasis_core::memory::{BlockWrite, EntryKey};
use oasis_core::working_set::HeldSlot;
use std::collections::BTreeMap;

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
        if let Some(before) = layer.checked_sub(RETURNS) {
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
                let place = &mut link.returning.as_mut_slice()[layer % RETURNS * link.bounce_bytes..][..from.bytes];
                let entries = place.chunks_exact_mut(entry).zip(&fetched.entries);
                entries.for_each(|(place, entry)| place.copy_from_slice(entry.bytes()));
            }
            Err(error) => {
                link.failures.entry(row).or_insert_with(|| error.to_string());
            }
        }
        let start = layer % RETURNS * link.bounce_bytes;
        for (at, part) in link.returning.parts(start, from.bytes) {
            let from = link.returning.address().offset(start + at);
            // SAFETY: its place on the device was waited for; the one in `returning` is not written again before that.
            unsafe { self.streams.offload.copy(to.offset(at), from, part)? };
        }
        Ok(())
    }

    /// Brings the entries of a layer's slots from the store, of a request that another executor has begun: `slots` has the
    /// first ones of each KV head, `to` is `[kv_heads][slots]` entries. Queued on the offload stream.
    pub fn bring_slots(
        &self,
        request: RequestId,
        layer: LayerId,
        slots: &[Vec<HeldSlot>],
        to: Address,
    ) -> anyhow::Result<()> {
        let Some(link) = &self.store_link else { return Ok(()) };
        let link = &mut *link.borrow_mut();
        if let Some(before) = layer.index().checked_sub(RETURNS) {
            // Its place is used again.
            self.events.copied[before].synchronize()?;
        }
        let key = |head, held: &HeldSlot| EntryKey { request, layer, block: held.block, head: KvHead::from(head) };
        let keys: Vec<EntryKey> =
            (slots.iter().enumerate()).flat_map(|(head, held)| held.iter().map(move |held| key(head, held))).collect();
        if keys.is_empty() {
            return Ok(());
        }
        let fetched = link.runtime.block_on(link.store.fetch(&keys))?;
        let (entry, place) = (entry_bytes(link.geometry.head_dim), layer.index() % RETURNS * link.bounce_bytes);
        let mut entries = fetched.entries.iter();
        for (head, held) in slots.iter().enumerate() {
            let (at, bytes) = (head * self.extent.slots * entry, held.len() * entry);
            let memory = link.returning.as_mut_slice()[place + at..][..bytes].chunks_exact_mut(entry);
            memory.zip(&mut entries).for_each(|(memory, entry)| memory.copy_from_slice(entry.bytes()));
            for (part, bytes) in link.returning.parts(place + at, bytes) {
                let from = link.returning.address().offset(place + at + part);
                // SAFETY: the slots are those of a row that does not decode yet; the entries stay until `copied`.
                unsafe { self.streams.offload.copy(to.offset(at + part), from, bytes)? };
            }
        }
        Ok(self.streams.offload.record(&self.events.copied[layer.index()])?)
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
        let params = GatherParams::new(list, copies);
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
            // SAFETY: both sides begin with a header.
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
