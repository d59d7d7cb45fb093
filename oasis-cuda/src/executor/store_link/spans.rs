//! Addresses of no memory, by which lists of copies name entries of a store.

use crate::kernels::{Address, EntryCopy};
use crate::layout::entry_bytes;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId};
use oasis_core::memory::EntryKey;
use std::collections::BTreeMap;

/// Where they begin: beyond what a device or host maps.
const NOWHERE: u64 = 1 << 60;

/// A request's run of addresses: `[layers][blocks][kv_heads]` entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    request: RequestId,
    row: usize,
    blocks: usize,
    bytes: u64,
}

/// A completed block: row, request, block.
pub(super) type Completed = (usize, RequestId, BlockId);

/// What a layer's list asks of the store and of the device.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Work {
    /// Entries to be brought, by row: what and where to.
    pub fetches: BTreeMap<usize, Vec<(EntryKey, Address)>>,
    /// Completed blocks to be stored: where their entries lie, by KV head.
    pub stores: BTreeMap<Completed, Vec<(KvHead, Address)>>,
    /// Copies within the device.
    pub inside: Vec<EntryCopy>,
}

/// The runs of all requests.
pub(super) struct Spans {
    geometry: KvGeometry,
    /// By first address.
    spans: BTreeMap<u64, Span>,
    next: u64,
}

impl Spans {
    pub fn new(geometry: KvGeometry) -> Self {
        Self { geometry, spans: BTreeMap::new(), next: NOWHERE }
    }

    /// Gives a request a run, which is never given again: what a late list names is known to be gone.
    pub fn add(&mut self, request: RequestId, row: usize, blocks: usize) {
        let bytes = (self.geometry.layers * blocks * self.geometry.block_bytes()) as u64;
        self.spans.insert(self.next, Span { request, row, blocks, bytes });
        self.next += bytes.next_multiple_of(4096) + 4096;
    }

    /// Takes a request's run away; gives its row.
    pub fn remove(&mut self, request: RequestId) -> Option<usize> {
        let base = self.address(request)?;
        self.spans.remove(&base.0).map(|span| span.row)
    }

    /// Where a request's run begins.
    pub fn address(&self, request: RequestId) -> Option<Address> {
        self.spans.iter().find(|(_, span)| span.request == request).map(|(base, _)| Address(*base))
    }

    fn contains(address: Address) -> bool {
        address.0 >= NOWHERE
    }

    /// The row and the entry at an address; `None` when its request is gone.
    pub fn entry_at(&self, address: Address) -> Option<(usize, EntryKey)> {
        let (base, span) = self.spans.range(..=address.0).next_back()?;
        let offset = address.0 - base;
        if offset >= span.bytes {
            return None;
        }
        let entry = offset as usize / entry_bytes(self.geometry.head_dim);
        let (block, head) = (entry / self.geometry.kv_heads, entry % self.geometry.kv_heads);
        let (layer, block) = (LayerId::from(block / span.blocks), BlockId::from(block % span.blocks));
        Some((span.row, EntryKey { request: span.request, layer, block, head: KvHead::from(head) }))
    }

    /// Sorts a layer's list.
    pub fn sort(&self, copies: &[EntryCopy]) -> Work {
        let mut work = Work::default();
        for copy in copies.iter().filter(|copy| copy.from != Address::NONE) {
            match (Self::contains(copy.from), Self::contains(copy.to)) {
                (true, _) => {
                    if let Some((row, key)) = self.entry_at(copy.from) {
                        work.fetches.entry(row).or_default().push((key, copy.to));
                    }
                }
                (false, true) => {
                    if let Some((row, key)) = self.entry_at(copy.to) {
                        let block = work.stores.entry((row, key.request, key.block)).or_default();
                        block.push((key.head, copy.from));
                    }
                }
                (false, false) => work.inside.push(*copy),
            }
        }
        work
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::geometry::KvDtype;

    const GEOMETRY: KvGeometry =
        KvGeometry { layers: 3, q_heads: 4, kv_heads: 2, head_dim: 64, block_tokens: 16, dtype: KvDtype::Bf16 };

    fn key(request: u64, layer: u32, block: u32, head: u32) -> EntryKey {
        let (layer, block) = (LayerId::from(layer as usize), BlockId(block));
        EntryKey { request: RequestId(request), layer, block, head: KvHead::from(head as usize) }
    }

    /// The address of an entry, as a selection computes it.
    fn address(spans: &Spans, request: u64, blocks: usize, key: &EntryKey) -> Address {
        let base = spans.address(RequestId(request)).expect("the request has a run");
        let block = key.layer.index() * blocks + key.block.index();
        base.offset((block * 2 + key.head.index()) * entry_bytes(64))
    }

    #[test]
    fn every_entry_is_found_at_its_address_and_at_no_other() {
        let mut spans = Spans::new(GEOMETRY);
        spans.add(RequestId(7), 0, 5);
        spans.add(RequestId(8), 1, 4);
        for (request, row, blocks) in [(7, 0, 5), (8, 1, 4)] {
            for (layer, block, head) in
                (0..3).flat_map(|l| (0..blocks).flat_map(move |b| (0..2).map(move |h| (l, b, h))))
            {
                let key = key(request, layer, block, head);
                let address = address(&spans, request, blocks as usize, &key);
                assert_eq!(spans.entry_at(address), Some((row, key)));
                assert_eq!(spans.entry_at(address.offset(entry_bytes(64) - 1)), Some((row, key)));
            }
        }
        let gone = address(&spans, 7, 5, &key(7, 1, 1, 1));
        let end = spans.address(RequestId(7)).expect("it has a run").offset(3 * 5 * 2 * entry_bytes(64));
        assert_eq!(spans.entry_at(end), None, "between two runs");
        spans.remove(RequestId(7));
        assert_eq!(spans.entry_at(gone), None);
        spans.add(RequestId(9), 0, 5);
        assert_eq!(spans.entry_at(gone), None, "addresses are not given again");
    }

    #[test]
    fn a_list_is_sorted_into_reads_writes_and_copies_within_the_device() {
        let mut spans = Spans::new(GEOMETRY);
        spans.add(RequestId(7), 3, 5);
        let (read, gone) = (key(7, 1, 2, 0), Address(NOWHERE - 4096).offset(0));
        let from = address(&spans, 7, 5, &read);
        let to = [0, 1].map(|head| address(&spans, 7, 5, &key(7, 1, 4, head)));
        let copies = [
            EntryCopy { from, to: Address(0x100) },
            EntryCopy { from: Address::NONE, to: Address(0x200) },
            EntryCopy { from: Address(0x300), to: to[0] },
            EntryCopy { from: Address(0x400), to: to[1] },
            EntryCopy { from: Address(0x500), to: Address(0x600) },
        ];
        let work = spans.sort(&copies);
        assert_eq!(work.fetches, BTreeMap::from([(3, vec![(read, Address(0x100))])]));
        let heads = vec![(KvHead::from(0), Address(0x300)), (KvHead::from(1), Address(0x400))];
        assert_eq!(work.stores, BTreeMap::from([((3, RequestId(7), BlockId(4)), heads)]));
        assert_eq!(work.inside, [copies[4]]);
        assert_eq!(spans.entry_at(gone), None);
        // What a list names of a request that is gone is left out.
        spans.remove(RequestId(7));
        assert_eq!(spans.sort(&copies), Work { inside: vec![copies[4]], ..Work::default() });
    }
}
