//! `capped-lru`: a few admissions a step, at the cost of the least recently wanted residents.

use super::{LRU_ORDER, cap_of, check_ratio, pair_misses_with_victims};
use oasis_core::policy::{DeviceCode, SelectBatch, Selector, SelectorSpec, SpecError};
use oasis_core::working_set::TransferPlan;
use serde::{Deserialize, Serialize};

/// Admits the best-ranked misses, at most `C = max(1, floor(fetch_ratio * K))` a KV head and step (the
/// paper's capped eviction policy, measured in its section 5.5).
///
/// What the cap defers stays wanted and enters later, unless its rank falls: the link's load is bounded whatever the
/// queries do.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CappedLru {
    /// Admissions a step as a part of the working set, 0 to 1; 0 admits nothing.
    pub fetch_ratio: f64,
}

impl Default for CappedLru {
    fn default() -> Self {
        Self { fetch_ratio: 0.05 }
    }
}

oasis_core::register! {
    kind: "capped-lru", about: "At most fetch_ratio x K admissions a step, least recently wanted residents leave",
    device_code: true,
    impl SelectorSpec for CappedLru {
        fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
            check_ratio("fetch_ratio", self.fetch_ratio)?;
            Ok(Box::new(CappedLruSelector { fetch_ratio: self.fetch_ratio }))
        }
    }
}

struct CappedLruSelector {
    fetch_ratio: f64,
}

impl Selector for CappedLruSelector {
    fn cap(&self, budget: usize) -> usize {
        cap_of(self.fetch_ratio, budget)
    }

    fn plan(&mut self, batch: &SelectBatch<'_>, plan: &mut TransferPlan) {
        pair_misses_with_victims(batch, plan, |slots| self.cap(slots));
    }

    fn device_code(&self) -> Option<DeviceCode> {
        Some(LRU_ORDER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cap_is_the_floor_but_at_least_one() {
        let cap = |fetch_ratio, budget| CappedLru { fetch_ratio }.build().unwrap().cap(budget);
        assert_eq!(cap(0.05, 128), 6);
        assert_eq!(cap(0.05, 19), 1);
        assert_eq!(cap(0.05, 1), 1);
        assert_eq!(cap(0.29, 100), 29);
        assert_eq!(cap(1.0, 128), 128);
        assert_eq!(cap(0.0, 128), 0);
    }

    #[test]
    fn an_impossible_ratio_is_named_with_a_hint() {
        for fetch_ratio in [-0.1, 1.01, f64::NAN, f64::INFINITY] {
            let error = CappedLru { fetch_ratio }.build().err().expect("the ratio is impossible");
            assert_eq!((error.field, error.expected.as_str()), ("fetch_ratio", "a number from 0 to 1"));
            assert!(error.hint.is_some());
        }
    }
}
