//! Policies without device code: what they need goes to the host, what they decide comes back as a list of copies for
//! the same gather. A layer's selection waits for the host; everything else of the step stays as it is.

use super::host_rows::Member;
use super::host_side::HostSide;
use super::memory::{LayerSets, SparseMemory};
use super::options::Bridge;
use super::parts::Parts;
use super::scope::Scope;
use crate::device::{DeviceError, PinnedBuffer, Stream};
use crate::kernels::{Address, CopyList, EntryCopy};
use crate::layout::{BLOCK_TOKENS, entry_bytes};
use oasis_core::ids::{BlockId, KvHead, LayerId, SlotId};
use oasis_core::pipeline::Selected;

/// Where the entries of one row and layer are.
struct Places {
    /// `[kv_heads][slots]` entries.
    entries: Address,
    /// `[kv_heads][2]` entries; block `b` lies at `b % 2`.
    tail: Address,
    /// `[blocks][kv_heads]` entries: the full KV.
    full: Address,
    slots: usize,
    kv_heads: usize,
    /// Bytes of an entry.
    entry: usize,
}

impl Places {
    fn slot(&self, head: KvHead, slot: SlotId) -> Address {
        self.entries.offset((head.index() * self.slots + slot.index()) * self.entry)
    }

    fn tail(&self, head: KvHead, block: BlockId) -> Address {
        self.tail.offset((head.index() * 2 + block.index() % 2) * self.entry)
    }

    fn full(&self, head: KvHead, block: BlockId) -> Address {
        self.full.offset((block.index() * self.kv_heads + head.index()) * self.entry)
    }

    /// The copies that a selection asks for; a completed block goes to where the full KV is, too.
    fn copies(&self, selected: &Selected, completed: Option<BlockId>, copies: &mut Vec<EntryCopy>) {
        for &(head, admission) in &selected.admissions {
            // What has just been completed is on its way to the full KV in this very list.
            let from = match completed {
                Some(block) if block == admission.block => self.tail(head, block),
                _ => self.full(head, admission.block),
            };
            copies.push(EntryCopy { from, to: self.slot(head, admission.slot) });
        }
        let Some(block) = completed else { return };
        for &(head, slot) in &selected.promotions {
            // An admission may have taken the slot of a promoted block that nobody wants.
            if !selected.admissions.iter().any(|(other, admission)| (*other, admission.slot) == (head, slot)) {
                copies.push(EntryCopy { from: self.tail(head, block), to: self.slot(head, slot) });
            }
        }
        for head in (0..self.kv_heads).map(KvHead::from) {
            copies.push(EntryCopy { from: self.tail(head, block), to: self.full(head, block) });
        }
    }
}

impl Parts {
    /// Selects for one layer on the host, after what `stream` has been given so far.
    pub fn select_on_host(
        &self,
        scope: Scope,
        sparse: &SparseMemory,
        layer: usize,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let Some(side) = &self.host_side else { return Ok(()) };
        let side = &mut *side.borrow_mut();
        if side.rows.members.is_empty() {
            // All of them have failed in a layer before.
            return Ok(());
        }
        let sets = &sparse.layers[layer];
        for index in 0..side.rows.members.len() {
            self.queue_facts(side, scope, (layer, index), sets, stream)?;
        }
        stream.synchronize()?;
        let members = side.rows.members.clone();
        let link = side.selecting(LayerId::from(layer))?;
        let Some(selected) = side.decide(LayerId::from(layer), self.host.as_ref(), link) else { return Ok(()) };
        let mut copies = Vec::new();
        for (member, selected) in members.iter().zip(&selected) {
            self.places(side, scope, sparse, layer, member).copies(selected, member.completed, &mut copies);
        }
        side.write_list(layer, &selected, &copies);
        let list = &side.lists[layer];
        let header = size_of::<CopyList>();
        for (at, bytes) in list.parts(header, size_of_val(copies.as_slice())) {
            // SAFETY: both sides have room for every slot and two copies a head; the list of this layer is written again
            // in the next step only, after this one is done.
            unsafe { stream.copy(sets.copies.address().offset(at), list.address().offset(header + at), bytes)? };
        }
        // SAFETY: as above; the list before was carried out, so that nothing counts on its header.
        unsafe { stream.copy(sparse.list(layer), list.address(), header) }
    }

    /// Queues the copies of what the policies need of one member.
    fn queue_facts(
        &self,
        side: &HostSide,
        scope: Scope,
        (layer, index): (usize, usize),
        sets: &LayerSets,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let spec = &self.model.spec;
        let Member { row, completed, .. } = side.rows.members[index];
        if side.rows.bridge == Bridge::Selection {
            let bytes = spec.kv_heads * self.extent.tiles * BLOCK_TOKENS * 4;
            // SAFETY: both sides have the scores of every row.
            return unsafe {
                bring(stream, side.facts(), index * bytes, sets.scores.address().offset(row * bytes), bytes)
            };
        }
        let bytes = self.extent.queries * spec.q_heads * spec.head_dim * 2;
        let from = self.query_buffer(layer).offset((row - scope.first_row()) * bytes);
        // SAFETY: the queries of the step are there until the next layer; the landing has room for those of every row.
        unsafe { bring(stream, side.facts(), index * bytes, from, bytes)? };
        if completed.is_none() && !side.rows.is_observed() {
            return Ok(());
        }
        let bytes = spec.kv_heads * 2 * entry_bytes(spec.head_dim);
        // SAFETY: both sides have the tails of every row.
        unsafe { bring(stream, side.tails(), index * bytes, sets.tail.address().offset(row * bytes), bytes) }
    }

    fn places(&self, side: &HostSide, scope: Scope, sparse: &SparseMemory, layer: usize, member: &Member) -> Places {
        let (spec, sets) = (&self.model.spec, &sparse.layers[layer]);
        let (slots, entry, pair) = (self.extent.slots, entry_bytes(spec.head_dim), member.row * spec.kv_heads);
        let stored = side.rows.row(member.row).map_or(Address::NONE, |row| row.host.offset(layer * row.stride));
        Places {
            entries: sets.slots.address().offset(pair * slots * entry),
            tail: sets.tail.address().offset(pair * 2 * entry),
            full: if scope.is_first() { sparse.staging.layer(layer) } else { stored },
            slots,
            kv_heads: spec.kv_heads,
            entry,
        }
    }
}

/// Queues a copy of device memory to byte `at` of pinned memory.
///
/// # Safety
/// As for [`Stream::copy`].
unsafe fn bring(stream: &Stream, to: &PinnedBuffer, at: usize, from: Address, bytes: usize) -> Result<(), DeviceError> {
    for (part, bytes) in to.parts(at, bytes) {
        // SAFETY: the caller answers for both ranges; a part lies within one chunk.
        unsafe { stream.copy(to.address().offset(at + part), from.offset(part), bytes)? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::working_set::Admission;

    #[test]
    fn a_completed_block_is_copied_from_its_tail_to_its_slot_and_to_the_full_kv() {
        let places = Places {
            entries: Address(1_000_000),
            tail: Address(2_000_000),
            full: Address(3_000_000),
            slots: 4,
            kv_heads: 2,
            entry: 100,
        };
        let admit = |head, block, slot| (KvHead(head), Admission { block: BlockId(block), slot: SlotId(slot) });
        let copies = |selected: &Selected, completed: Option<u32>| {
            let mut copies = Vec::new();
            places.copies(selected, completed.map(BlockId), &mut copies);
            copies.into_iter().map(|copy| (copy.from.0, copy.to.0)).collect::<Vec<_>>()
        };
        let admissions = vec![admit(0, 7, 2), admit(1, 3, 0)];
        let selected = Selected { admissions, ..Selected::default() };
        assert_eq!(copies(&selected, None), [(3_001_400, 1_000_200), (3_000_700, 1_000_400)]);
        // Head 0 wants the completed block 9 itself; in head 1 an admission takes the slot that it was promoted to.
        let promotions = vec![(KvHead(0), SlotId(3)), (KvHead(1), SlotId(0))];
        let selected = Selected { promotions, ..selected };
        let stores = [(2_000_100, 3_001_800), (2_000_300, 3_001_900)];
        let expected = [(3_001_400, 1_000_200), (3_000_700, 1_000_400), (2_000_100, 1_000_300), stores[0], stores[1]];
        assert_eq!(copies(&selected, Some(9)), expected);
        let selected = Selected { is_fill: true, admissions: vec![admit(1, 9, 1)], ..Selected::default() };
        assert_eq!(copies(&selected, Some(9)), [(2_000_300, 1_000_500), stores[0], stores[1]]);
    }
}
