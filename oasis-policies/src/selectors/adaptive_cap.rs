//! `adaptive-cap`: as many admissions a step as the link has time for.

use super::{LRU_ORDER, cap_of, check_ratio, pair_misses_with_victims};
use oasis_core::policy::{DeviceCode, LinkRate, SelectBatch, Selector, SelectorSpec, SpecError};
use oasis_core::working_set::TransferPlan;
use serde::{Deserialize, Serialize};

/// As [`CappedLru`](super::CappedLru) with a cap that follows the link: each layer admits what the measured speed moves
/// in `load` of the time until the next layer needs the link, shared by the KV heads of the whole batch. The pipeline
/// keeps up as long as a layer's transfer fits that time (paper, section 4.2.2), and a load below 1 brings the cap back
/// down where the link itself has become what a step waits for.
///
/// A GPU sets the cap once a step, by what its kernels have measured in the steps before.
///
/// The cap depends on time and on the batch. So may the tokens: runs are not reproducible with this selector.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdaptiveCap {
    /// Least admissions a step as a part of the working set, 0 to 1; also the cap until something has been measured.
    pub min_ratio: f64,
    /// Most admissions a step as a part of the working set, 0 to 1.
    pub max_ratio: f64,
    /// Part of the link's time that is used, above 0 and below 1.
    pub load: f64,
}

impl Default for AdaptiveCap {
    fn default() -> Self {
        Self { min_ratio: 0.02, max_ratio: 0.25, load: 0.8 }
    }
}

oasis_core::register! {
    kind: "adaptive-cap", about: "As capped-lru with a cap that follows the measured speed of the link; not reproducible",
    device_code: true,
    impl SelectorSpec for AdaptiveCap {
        fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
            let Self { min_ratio, max_ratio, load } = *self;
            check_ratio("min_ratio", min_ratio)?;
            check_ratio("max_ratio", max_ratio)?;
            if min_ratio > max_ratio {
                return Err(SpecError::new("min_ratio", format!("at most max_ratio, {max_ratio}"), min_ratio));
            }
            if !(load > 0.0 && load < 1.0) {
                return Err(SpecError::new("load", "a number above 0 and below 1", load)
                    .hint("at 1 the link would have no time to catch up"));
            }
            Ok(Box::new(AdaptiveCapSelector(self.clone())))
        }
    }
}

struct AdaptiveCapSelector(AdaptiveCap);

impl AdaptiveCapSelector {
    /// Admissions of each of `heads` KV heads of the batch, for a working set of `slots` slots.
    fn cap_now(&self, slots: usize, heads: usize, link: Option<LinkRate>) -> usize {
        let AdaptiveCap { min_ratio, max_ratio, load } = self.0;
        let (least, most) = (cap_of(min_ratio, slots), cap_of(max_ratio, slots));
        let Some(link) = link else { return least };
        // Infinite where an entry takes no measurable time; NaN, of nothing in no time, becomes 0.
        let entries = load * link.interval.as_secs_f64() / link.entry.as_secs_f64();
        ((entries / heads.max(1) as f64) as usize).clamp(least, most)
    }
}

impl Selector for AdaptiveCapSelector {
    fn cap(&self, budget: usize) -> usize {
        cap_of(self.0.max_ratio, budget)
    }

    fn plan(&mut self, batch: &SelectBatch<'_>, plan: &mut TransferPlan) {
        let heads = batch.requests.len() * plan.kv_heads();
        pair_misses_with_victims(batch, plan, |slots| self.cap_now(slots, heads, batch.link));
    }

    fn cap_by_link(&self, budget: usize, heads: usize, link: Option<LinkRate>) -> Option<usize> {
        Some(self.cap_now(budget, heads, link))
    }

    fn device_code(&self) -> Option<DeviceCode> {
        Some(LRU_ORDER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_cap_is_what_the_link_moves_in_the_time_it_has() {
        let selector = AdaptiveCapSelector(AdaptiveCap { min_ratio: 0.02, max_ratio: 0.25, load: 0.5 });
        let cap = |entry, interval, heads| {
            let [entry, interval] = [entry, interval].map(Duration::from_micros);
            selector.cap_now(100, heads, Some(LinkRate { entry, interval }))
        };
        // Half of 1000 us holds 50 entries of 10 us: 12 for each of 4 heads.
        assert_eq!(cap(10, 1000, 4), 12);
        assert_eq!(cap(10, 1000, 1), 25, "at most max_ratio");
        assert_eq!(cap(10, 1000, 400), 2, "at least min_ratio");
        assert_eq!((cap(0, 1000, 4), cap(0, 0, 4)), (25, 2));
        assert_eq!(selector.cap_now(100, 4, None), 2);
        assert_eq!(selector.cap(100), 25);
    }

    #[test]
    fn impossible_settings_are_named() {
        let field = |min_ratio, max_ratio, load| {
            AdaptiveCap { min_ratio, max_ratio, load }.build().err().expect("these settings are impossible").field
        };
        assert_eq!(field(0.3, 0.2, 0.5), "min_ratio");
        assert_eq!(field(0.1, 1.2, 0.5), "max_ratio");
        for load in [0.0, 1.0, f64::NAN] {
            assert_eq!(field(0.1, 0.2, load), "load");
        }
    }
}
