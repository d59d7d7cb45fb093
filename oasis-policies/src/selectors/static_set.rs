//! `static`: nothing is admitted.

use super::LRU_ORDER;
use oasis_core::policy::{DeviceCode, SelectBatch, Selector, SelectorSpec, SpecError};
use oasis_core::working_set::TransferPlan;
use serde::{Deserialize, Serialize};

/// Keeps the first working set and lets only completed tail blocks in, C = 0: no link traffic while decoding. What is
/// lost without dynamic selection, to compare with [`CappedLru`](super::CappedLru).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StaticSet {}

oasis_core::register! {
    kind: "static", about: "Keeps the first working set: no link traffic while decoding", device_code: true,
    impl SelectorSpec for StaticSet {
        fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
            Ok(Box::new(StaticSelector))
        }
    }
}

struct StaticSelector;

impl Selector for StaticSelector {
    fn cap(&self, _budget: usize) -> usize {
        0
    }

    fn plan(&mut self, _batch: &SelectBatch<'_>, _plan: &mut TransferPlan) {}

    fn device_code(&self) -> Option<DeviceCode> {
        Some(LRU_ORDER)
    }
}
