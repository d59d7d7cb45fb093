//! `upper-half`: a resident leaves only for a block whose score lies in the upper half of what is wanted.

use oasis_core::ids::KvHead;
use oasis_core::policy::{DeviceCode, SelectBatch, Selector, SelectorSpec, SpecError};
use oasis_core::working_set::{Admission, TransferPlan};
use serde::{Deserialize, Serialize};

/// Fills free slots by rank, and beyond them admits only misses above the middle of the wanted scores: a sixteenth of K a
/// step at most.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpperHalf {}

oasis_core::register! {
    kind: "upper-half", about: "Admits a miss only above the middle of the wanted scores", device_code: true,
    impl SelectorSpec for UpperHalf {
        fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
            Ok(Box::new(UpperHalf {}))
        }
    }
}

impl Selector for UpperHalf {
    fn cap(&self, budget: usize) -> usize {
        budget.div_ceil(16)
    }

    fn plan(&mut self, batch: &SelectBatch<'_>, plan: &mut TransferPlan) {
        for (index, request) in batch.requests.iter().enumerate() {
            for head in (0..request.have.kv_heads()).map(KvHead::from) {
                let (have, want) = (request.have.head(head), batch.want.head(index, head));
                let mut finite = want.iter().map(|wanted| wanted.score).filter(|score| score.is_finite());
                let best = finite.next().unwrap_or(f32::NEG_INFINITY);
                let middle = 0.5 * best + 0.5 * finite.next_back().unwrap_or(best);
                let residents = have.residents();
                let misses = want.iter().filter(|wanted| !residents.contains(wanted.block));
                let free = have.blocks.iter().filter(|block| block.is_none()).count();
                let gains = misses.enumerate().take_while(|(rank, miss)| *rank < free || miss.score >= middle);
                let victims = have.victims(batch.want.wanted(index, head));
                for ((_, miss), slot) in gains.take(self.cap(request.have.slots())).zip(victims) {
                    plan.push(index, head, Admission { block: miss.block, slot });
                }
            }
        }
    }

    fn device_code(&self) -> Option<DeviceCode> {
        Some(DeviceCode::new("upper_half.cuh", include_str!("upper_half.cuh")))
    }
}
