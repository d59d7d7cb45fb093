//! `top-only`: a miss is worth a transfer only where it ranks high.

mod upper_half;

pub use upper_half::UpperHalf;

use oasis_core::ids::KvHead;
use oasis_core::policy::{SelectBatch, Selector, SelectorSpec, SpecError};
use oasis_core::working_set::{Admission, TransferPlan};
use serde::{Deserialize, Serialize};

/// Admits misses among the `top` best wanted blocks, at most `cap` a KV head and step.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TopOnly {
    /// How far down the ranking a miss may stand, in blocks.
    pub top: usize,
    /// Most admissions a KV head and step, C.
    pub cap: usize,
}

impl Default for TopOnly {
    fn default() -> Self {
        Self { top: 32, cap: 6 }
    }
}

oasis_core::register! {
    kind: "top-only", about: "Admits a miss only where it is among the `top` best blocks", device_code: false,
    impl SelectorSpec for TopOnly {
        fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
            let TopOnly { top, cap } = *self;
            if top == 0 {
                return Err(SpecError::new("top", "at least 1 block", top).hint("`static` admits nothing"));
            }
            Ok(Box::new(TopOnlySelector { top, cap }))
        }
    }
}

struct TopOnlySelector {
    top: usize,
    cap: usize,
}

impl Selector for TopOnlySelector {
    fn cap(&self, budget: usize) -> usize {
        self.cap.min(budget)
    }

    fn plan(&mut self, batch: &SelectBatch<'_>, plan: &mut TransferPlan) {
        for (index, request) in batch.requests.iter().enumerate() {
            for head in (0..request.have.kv_heads()).map(KvHead::from) {
                let have = request.have.head(head);
                let residents = have.residents();
                let best = batch.want.head(index, head).iter().take(self.top).map(|wanted| wanted.block);
                let misses = best.filter(|block| !residents.contains(*block)).take(self.cap);
                // Free slots first, then those whose block nobody wants, least recently wanted first.
                for (block, slot) in misses.zip(have.victims(batch.want.wanted(index, head))) {
                    plan.push(index, head, Admission { block, slot });
                }
            }
        }
    }
}
