//! `fetch-all`: everything that is wanted is admitted.

use super::{LRU_ORDER, pair_misses_with_victims};
use oasis_core::policy::{DeviceCode, SelectBatch, Selector, SelectorSpec, SpecError};
use oasis_core::working_set::TransferPlan;
use serde::{Deserialize, Serialize};

/// Admits every wanted block, C = K: the working set follows the prediction exactly and the link carries whatever that
/// takes. What selection without a cap would do, to compare with [`CappedLru`](super::CappedLru).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FetchAll {}

oasis_core::register! {
    kind: "fetch-all", about: "Admits every wanted block, whatever the link must carry", device_code: true,
    impl SelectorSpec for FetchAll {
        fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
            Ok(Box::new(FetchAllSelector))
        }
    }
}

struct FetchAllSelector;

impl Selector for FetchAllSelector {
    fn cap(&self, budget: usize) -> usize {
        budget
    }

    fn plan(&mut self, batch: &SelectBatch<'_>, plan: &mut TransferPlan) {
        pair_misses_with_victims(batch, plan, |slots| slots);
    }

    fn device_code(&self) -> Option<DeviceCode> {
        Some(LRU_ORDER)
    }
}
