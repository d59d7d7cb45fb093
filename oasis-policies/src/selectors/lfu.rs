//! `lfu`: a few admissions a step, at the cost of the least often wanted residents.

use super::{cap_of, check_ratio, pair_by};
use oasis_core::ids::SlotId;
use oasis_core::policy::{DeviceCode, SelectBatch, Selector, SelectorSpec, SpecError};
use oasis_core::working_set::{BlockSet, HeadSet, TransferPlan};
use serde::{Deserialize, Serialize};

const DEVICE_CODE: DeviceCode = DeviceCode::new("lfu.cuh", include_str!("lfu.cuh"));

/// As [`CappedLru`](super::CappedLru), but those leave first that the fewest steps have wanted since they came; ties by
/// the last step that did. A block that many steps want outlives a stretch of steps that do not; one that has just come
/// is the first to leave once it is no longer wanted.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Lfu {
    /// Admissions a step as a part of the working set, 0 to 1; 0 admits nothing.
    pub fetch_ratio: f64,
}

impl Default for Lfu {
    fn default() -> Self {
        Self { fetch_ratio: 0.05 }
    }
}

oasis_core::register! {
    kind: "lfu", about: "At most fetch_ratio x K admissions a step, least often wanted residents leave",
    device_code: true,
    impl SelectorSpec for Lfu {
        fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
            check_ratio("fetch_ratio", self.fetch_ratio)?;
            Ok(Box::new(LfuSelector { fetch_ratio: self.fetch_ratio }))
        }
    }
}

struct LfuSelector {
    fetch_ratio: f64,
}

impl Selector for LfuSelector {
    fn cap(&self, budget: usize) -> usize {
        cap_of(self.fetch_ratio, budget)
    }

    fn plan(&mut self, batch: &SelectBatch<'_>, plan: &mut TransferPlan) {
        pair_by(batch, plan, |slots| self.cap(slots), least_often_wanted, |misses, _, _| misses.len());
    }

    fn device_code(&self) -> Option<DeviceCode> {
        Some(DEVICE_CODE)
    }
}

/// Slots whose block is not in `want`: free ones, then by how often and how lately their block was wanted; ties by slot.
fn least_often_wanted(have: &HeadSet<'_>, want: &BlockSet) -> Vec<SlotId> {
    let mut victims = have.victims(want);
    // Stable: those that were wanted equally often stay least recently wanted first.
    victims.sort_by_key(|slot| have.blocks[slot.index()].map(|_| have.times_selected[slot.index()]));
    victims
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::ids::{BlockId, KvHead, Step};
    use oasis_core::working_set::{Admission, WorkingSet};

    #[test]
    fn the_least_often_wanted_leave_first() {
        let head = KvHead(0);
        let mut set = WorkingSet::new(1, 5);
        let blocks = |blocks: &[u32]| -> BlockSet { blocks.iter().map(|&b| BlockId(b)).collect() };
        for slot in [0, 1, 2, 4] {
            let admission = Admission { block: BlockId(slot), slot: SlotId(slot) };
            set.place(head, admission, Step(1));
        }
        // Block 0 twice more, long ago; 1 and 2 once more, 2 later.
        set.touch(head, &blocks(&[0]), Step(2));
        set.touch(head, &blocks(&[0, 1]), Step(3));
        set.touch(head, &blocks(&[2]), Step(4));
        let order = least_often_wanted(&set.head(head), &blocks(&[4]));
        assert_eq!(order, [SlotId(3), SlotId(1), SlotId(2), SlotId(0)]);
    }
}
