//! `hysteresis`: what is resident stays unless something clearly better comes.

use super::{cap_of, check_ratio, pair_by};
use oasis_core::policy::{DeviceCode, SelectBatch, Selector, SelectorSpec, SpecError};
use oasis_core::working_set::{RankedBlock, TransferPlan};
use serde::{Deserialize, Serialize};

/// As [`CappedLru`](super::CappedLru), but a miss pushes a resident out only where its score is at least `margin` of
/// the way from the lowest wanted score to the highest. No resident that leaves has a higher score than the lowest
/// wanted one, so this much at least is gained. Blocks that come and go at the edge of the top K stay where they are
/// and cost no traffic; free slots are filled by rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hysteresis {
    /// Admissions a step as a part of the working set, 0 to 1; 0 admits nothing.
    pub fetch_ratio: f64,
    /// Gain below which nothing moves, as a part of the range of wanted scores, 0 to 1; 0 is `capped-lru`.
    pub margin: f64,
}

impl Default for Hysteresis {
    fn default() -> Self {
        Self { fetch_ratio: 0.05, margin: 0.1 }
    }
}

oasis_core::register! {
    kind: "hysteresis", about: "As capped-lru, but only what beats the lowest wanted score by a margin pushes out others",
    device_code: true,
    impl SelectorSpec for Hysteresis {
        fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
            let Self { fetch_ratio, margin } = *self;
            check_ratio("fetch_ratio", fetch_ratio)?;
            if !(0.0..=1.0).contains(&margin) {
                return Err(SpecError::new("margin", "a number from 0 to 1", margin)
                    .hint("it is a part of the range of wanted scores: 0 is capped-lru, 1 admits the best block alone"));
            }
            Ok(Box::new(HysteresisSelector { fetch_ratio, margin }))
        }
    }
}

struct HysteresisSelector {
    fetch_ratio: f64,
    margin: f64,
}

impl HysteresisSelector {
    /// The score from which on a miss may push a resident out. Infinite scores, of blocks that are always wanted, do not
    /// count.
    fn threshold(&self, want: &[RankedBlock]) -> f64 {
        let mut finite = want.iter().map(|w| f64::from(w.score)).filter(|score| score.is_finite());
        let Some(best) = finite.next() else { return f64::NEG_INFINITY };
        let worst = finite.next_back().unwrap_or(best);
        worst + self.margin * (best - worst)
    }
}

impl Selector for HysteresisSelector {
    fn cap(&self, budget: usize) -> usize {
        cap_of(self.fetch_ratio, budget)
    }

    fn plan(&mut self, batch: &SelectBatch<'_>, plan: &mut TransferPlan) {
        let admissible = |misses: &[RankedBlock], free: usize, want: &[RankedBlock]| {
            let threshold = self.threshold(want);
            let is_gain = |miss: &RankedBlock| self.margin == 0.0 || f64::from(miss.score) >= threshold;
            misses.iter().enumerate().take_while(|(index, miss)| *index < free || is_gain(miss)).count()
        };
        pair_by(batch, plan, |slots| self.cap(slots), |have, want| have.victims(want), admissible);
    }

    fn device_code(&self) -> Option<DeviceCode> {
        let constant = Some(self.margin.to_bits());
        Some(DeviceCode { constant, ..DeviceCode::new("hysteresis.cuh", include_str!("hysteresis.cuh")) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::ids::{BlockId, KvHead, LayerId, SlotId, Step};
    use oasis_core::policy::SelectRequest;
    use oasis_core::working_set::{Admission, Ranking, WorkingSet};

    /// Blocks admitted to a set of `slots` slots that holds blocks 90, 91, ... in all but `free` of them.
    fn admitted(margin: f64, scores: &[f32], slots: u32, free: u32) -> Vec<u32> {
        let head = KvHead(0);
        let mut have = WorkingSet::new(1, slots as usize);
        for slot in free..slots {
            have.place(head, Admission { block: BlockId(90 + slot), slot: SlotId(slot) }, Step(1));
        }
        let mut want = Ranking::new(1, 1);
        let ranked = (0..).zip(scores).map(|(block, &score)| RankedBlock { block: BlockId(block), score });
        want.set(0, head, ranked.collect());
        let mut plan = TransferPlan::new(1, 1);
        let batch =
            SelectBatch { layer: LayerId(0), want: &want, requests: &[SelectRequest { have: &have }], link: None };
        Hysteresis { fetch_ratio: 1.0, margin }.build().unwrap().plan(&batch, &mut plan);
        plan.head(0, head).iter().map(|admission| admission.block.0).collect()
    }

    #[test]
    fn only_a_clear_gain_pushes_a_resident_out() {
        // Thresholds 0, 0.5, 6 and 10.
        let scores = [10.0, 7.0, 1.0, 0.25, 0.0];
        assert_eq!(admitted(0.0, &scores, 5, 0), [0, 1, 2, 3, 4]);
        assert_eq!(admitted(0.05, &scores, 5, 0), [0, 1, 2]);
        assert_eq!(admitted(0.6, &scores, 5, 0), [0, 1]);
        assert_eq!(admitted(1.0, &scores, 5, 0), [0]);
        assert_eq!(admitted(1.0, &scores, 5, 3), [0, 1, 2], "free slots are filled by rank");
    }

    #[test]
    fn blocks_that_are_always_wanted_enter_and_nan_does_not() {
        let scores = [f32::INFINITY, 10.0, 0.0, f32::NAN];
        assert_eq!(admitted(0.5, &scores, 4, 0), [0, 1]);
        assert_eq!(admitted(0.5, &[f32::INFINITY, f32::INFINITY], 4, 0), [0, 1]);
    }

    #[test]
    fn an_impossible_margin_is_named_with_a_hint() {
        for margin in [-0.1, 1.1, f64::NAN] {
            let error = Hysteresis { fetch_ratio: 0.1, margin }.build().err().expect("no such part of a range");
            assert!(error.field == "margin" && error.hint.is_some());
        }
    }
}
