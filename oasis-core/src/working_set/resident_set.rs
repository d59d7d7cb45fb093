//! Which block each slot holds, when it was last wanted and how often.

use crate::ids::{BlockId, KvHead, SlotId, Step};
use crate::working_set::{Admission, BlockSet};

/// Slots of every KV head of one (request, layer).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkingSet {
    slots: usize,
    /// `[kv_heads][slots]`
    blocks: Vec<Option<BlockId>>,
    /// `[kv_heads][slots]`
    last_selected: Vec<Step>,
    /// `[kv_heads][slots]`
    times_selected: Vec<u32>,
}

/// One occupied slot of one KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldSlot {
    /// Slot.
    pub slot: SlotId,
    /// Block in it.
    pub block: BlockId,
    /// Step that last wanted the block.
    pub last_selected: Step,
    /// Steps that have wanted the block since it was placed there, that one included.
    pub times_selected: u32,
}

/// Slots of one KV head.
#[derive(Debug, Clone, Copy)]
pub struct HeadSet<'a> {
    /// Block in each slot, `[slots]`; `None` is a free slot.
    pub blocks: &'a [Option<BlockId>],
    /// Step that last wanted the slot's block, `[slots]`.
    pub last_selected: &'a [Step],
    /// Steps that have wanted the slot's block since it was placed there, that one included, `[slots]`.
    pub times_selected: &'a [u32],
}

impl HeadSet<'_> {
    /// Whether `block` is resident.
    pub fn contains(&self, block: BlockId) -> bool {
        self.blocks.contains(&Some(block))
    }

    /// The resident blocks.
    pub fn residents(&self) -> BlockSet {
        self.blocks.iter().copied().flatten().collect()
    }

    /// Slots whose block is not in `want`, free ones first, then least recently wanted; ties by slot.
    pub fn victims(&self, want: &BlockSet) -> Vec<SlotId> {
        let mut victims: Vec<(Option<Step>, SlotId)> = (self.blocks.iter().zip(self.last_selected).enumerate())
            .filter_map(|(slot, (block, &step))| match block {
                None => Some((None, SlotId::from(slot))),
                Some(block) if !want.contains(*block) => Some((Some(step), SlotId::from(slot))),
                Some(_) => None,
            })
            .collect();
        victims.sort_unstable();
        victims.into_iter().map(|(_, slot)| slot).collect()
    }
}

impl WorkingSet {
    /// `slots` free slots for each of `kv_heads` KV heads.
    pub fn new(kv_heads: usize, slots: usize) -> Self {
        let places = kv_heads * slots;
        Self {
            slots,
            blocks: vec![None; places],
            last_selected: vec![Step(0); places],
            times_selected: vec![0; places],
        }
    }

    /// The working set of a prompt of `blocks` complete blocks: block `b` in slot `b` where there is a slot for each, else
    /// nothing yet.
    pub fn of_prompt(kv_heads: usize, slots: usize, blocks: usize) -> Self {
        let mut set = Self::new(kv_heads, slots);
        if blocks <= slots {
            for (head, index) in (0..kv_heads).flat_map(|head| (0..blocks).map(move |index| (head, index))) {
                let admission = Admission { block: BlockId::from(index), slot: SlotId::from(index) };
                set.place(KvHead::from(head), admission, Step(0));
            }
        }
        set
    }

    /// Slots of one KV head.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// KV heads.
    pub fn kv_heads(&self) -> usize {
        self.blocks.len() / self.slots.max(1)
    }

    /// Slots of one KV head.
    pub fn head(&self, head: KvHead) -> HeadSet<'_> {
        let range = head.index() * self.slots..(head.index() + 1) * self.slots;
        HeadSet {
            blocks: &self.blocks[range.clone()],
            last_selected: &self.last_selected[range.clone()],
            times_selected: &self.times_selected[range],
        }
    }

    /// Whether no slot of any head holds a block.
    pub fn is_empty(&self) -> bool {
        self.blocks.iter().all(Option::is_none)
    }

    /// Records that `step` wanted the resident ones of `want`.
    pub fn touch(&mut self, head: KvHead, want: &BlockSet, step: Step) {
        let range = head.index() * self.slots..(head.index() + 1) * self.slots;
        for place in range {
            if self.blocks[place].is_some_and(|block| want.contains(block)) {
                // Placed by this very step: counted already.
                if self.last_selected[place] != step {
                    self.times_selected[place] = self.times_selected[place].saturating_add(1);
                }
                self.last_selected[place] = step;
            }
        }
    }

    /// Puts a block into a slot, replacing what was there.
    pub fn place(&mut self, head: KvHead, admission: Admission, step: Step) {
        let index = head.index() * self.slots + admission.slot.index();
        self.blocks[index] = Some(admission.block);
        self.last_selected[index] = step;
        self.times_selected[index] = 1;
    }

    /// What the occupied slots of one head hold, in slot order.
    pub fn held(&self, head: KvHead) -> Vec<HeldSlot> {
        let HeadSet { blocks, last_selected, times_selected } = self.head(head);
        (blocks.iter().zip(last_selected).zip(times_selected).enumerate())
            .filter_map(|(slot, ((&block, &last_selected), &times_selected))| {
                Some(HeldSlot { slot: SlotId::from(slot), block: block?, last_selected, times_selected })
            })
            .collect()
    }

    /// Puts back what a slot held in the working set of another executor.
    pub fn restore(&mut self, head: KvHead, held: HeldSlot) {
        let index = head.index() * self.slots + held.slot.index();
        self.blocks[index] = Some(held.block);
        self.last_selected[index] = held.last_selected;
        self.times_selected[index] = held.times_selected;
    }

    /// Slot that a just completed tail block is promoted to: a free one, else the least recently wanted of those whose
    /// block is not in `want`; `None` when every resident is wanted and `block` is not, so that it stays in the store.
    pub fn promotion_slot(&self, head: KvHead, want: &BlockSet) -> Option<SlotId> {
        self.head(head).victims(want).first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(blocks: &[Option<u32>], steps: &[u64]) -> WorkingSet {
        let mut set = WorkingSet::new(1, blocks.len());
        for (slot, (block, step)) in blocks.iter().zip(steps).enumerate() {
            if let Some(block) = block {
                set.place(KvHead(0), Admission { block: BlockId(*block), slot: SlotId::from(slot) }, Step(*step));
            }
        }
        set
    }

    #[test]
    fn victims_are_free_slots_then_least_recently_wanted() {
        let set = set(&[Some(7), None, Some(3), Some(9), Some(1)], &[5, 0, 2, 2, 4]);
        let victims = set.head(KvHead(0)).victims(&[BlockId(1)].into_iter().collect());
        assert_eq!(victims, [SlotId(1), SlotId(2), SlotId(3), SlotId(0)]);
    }

    #[test]
    fn a_completed_block_stays_out_when_every_resident_is_wanted() {
        let set = set(&[Some(0), Some(1)], &[3, 3]);
        let want = |blocks: &[u32]| -> BlockSet { blocks.iter().map(|&b| BlockId(b)).collect() };
        assert_eq!(set.promotion_slot(KvHead(0), &want(&[0, 1])), None);
        assert_eq!(set.promotion_slot(KvHead(0), &want(&[2, 1])), Some(SlotId(0)));
    }

    #[test]
    fn a_restored_set_equals_the_one_that_was_held() {
        let mut original = set(&[Some(7), None, Some(3)], &[5, 0, 2]);
        original.touch(KvHead(0), &[BlockId(3)].into_iter().collect(), Step(6));
        let mut restored = WorkingSet::new(1, 3);
        original.held(KvHead(0)).into_iter().for_each(|held| restored.restore(KvHead(0), held));
        assert_eq!(restored, original);
    }

    #[test]
    fn touch_marks_only_wanted_residents() {
        let mut set = set(&[Some(4), Some(6)], &[1, 1]);
        set.touch(KvHead(0), &[BlockId(6)].into_iter().collect(), Step(9));
        assert_eq!(set.head(KvHead(0)).last_selected, [Step(1), Step(9)]);
        set.touch(KvHead(0), &[BlockId(4), BlockId(6)].into_iter().collect(), Step(9));
        assert_eq!(set.head(KvHead(0)).times_selected, [2, 2], "a step counts once");
    }
}
