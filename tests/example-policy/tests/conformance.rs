//! The selectors keep what their trait promises.

use oasis_core::ids::{BlockId, KvHead, LayerId, SlotId, Step};
use oasis_core::policy::{SelectBatch, SelectRequest, SelectorSpec};
use oasis_core::registry::{self, Role};
use oasis_core::testkit;
use oasis_core::working_set::{Admission, RankedBlock, Ranking, TransferPlan, WorkingSet};
use oasis_example_policy::{TopOnly, UpperHalf};

#[test]
fn the_registered_kinds_pass_the_suite_of_selectors() {
    for kind in ["top-only", "upper-half"] {
        testkit::conforms(registry::find(Role::Selector, kind).unwrap());
    }
}

#[test]
fn it_passes_with_every_setting() {
    for (top, cap) in [(1, 1), (4, 0), (usize::MAX, usize::MAX)] {
        testkit::selector::conforms(&TopOnly { top, cap });
    }
}

#[test]
fn without_a_limit_on_ranks_it_is_capped_lru() {
    testkit::selector::equals_capped_lru(&TopOnly { top: usize::MAX, cap: 2 });
}

/// Blocks 10, 11, 12 and 13 are resident; `want` is blocks 0, 1, ... by score.
fn admitted(scores: &[f32], slots: usize) -> Vec<(u32, u32)> {
    let head = KvHead(0);
    let mut have = WorkingSet::new(1, slots);
    for slot in 0..4 {
        let step = Step(u64::from(9 - slot));
        have.place(head, Admission { block: BlockId(10 + slot), slot: SlotId(slot) }, step);
    }
    let mut want = Ranking::new(1, 1);
    let ranked = (0..).zip(scores).map(|(block, &score)| RankedBlock { block: BlockId(block), score });
    want.set(0, head, ranked.collect());
    let mut plan = TransferPlan::new(1, 1);
    let batch = SelectBatch { layer: LayerId(0), want: &want, requests: &[SelectRequest { have: &have }], link: None };
    UpperHalf {}.build().unwrap().plan(&batch, &mut plan);
    plan.head(0, head).iter().map(|admission| (admission.block.0, admission.slot.0)).collect()
}

#[test]
fn only_the_upper_half_pushes_residents_out() {
    // C is 2 of 32 slots, and 1 of 4.
    assert_eq!(admitted(&[8.0, 5.0, 0.0], 32), [(0, 4), (1, 5)], "free slots are filled by rank");
    assert_eq!(admitted(&[8.0, 0.0], 4), [(0, 3)], "the least recently wanted leaves");
    assert_eq!(admitted(&[f32::INFINITY, 8.0, 0.0], 4), [(0, 3)], "what is always wanted is above the middle");
    assert_eq!(admitted(&[f32::NAN], 4), []);
}

#[test]
fn a_selector_with_device_code_is_short() {
    let lines =
        include_str!("../src/upper_half.rs").lines().count() + include_str!("../src/upper_half.cuh").lines().count();
    assert!(lines <= 80, "{lines}");
}
