//! How fast entries cross the link, and how often a layer needs it.

use crate::ids::{LayerId, Step};
use crate::policy::LinkRate;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Weight of a new value against what was measured before: a change is followed within some dozen layers.
const WEIGHT: f64 = 1.0 / 16.0;

/// Measures a [`LinkRate`] from what the select and transfer stages report.
#[derive(Default)]
pub struct LinkMeter(Mutex<Measured>);

#[derive(Default)]
struct Measured {
    /// Seconds.
    entry: Option<f64>,
    /// Seconds.
    interval: Option<f64>,
    last: Option<(LayerId, Step, Instant)>,
}

impl LinkMeter {
    /// A layer is about to be selected.
    pub fn selecting(&self, layer: LayerId, step: Step, now: Instant) {
        self.update(|measured| {
            if let Some((before, of_step, then)) = measured.last.replace((layer, step, now))
                // Between steps the engine may have had nothing to do.
                && of_step == step
                && before.0 + 1 == layer.0
            {
                mean(&mut measured.interval, now.saturating_duration_since(then));
            }
        });
    }

    /// `entries`, at least one, took `time` to reach their slots.
    pub fn carried(&self, entries: usize, time: Duration) {
        self.update(|measured| mean(&mut measured.entry, time.div_f64(entries as f64)));
    }

    /// What was measured, once there is something of both.
    pub fn rate(&self) -> Option<LinkRate> {
        self.update(|measured| {
            let seconds = Duration::from_secs_f64;
            Some(LinkRate { entry: seconds(measured.entry?), interval: seconds(measured.interval?) })
        })
    }

    fn update<T>(&self, f: impl FnOnce(&mut Measured) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn mean(mean: &mut Option<f64>, value: Duration) {
    let value = value.as_secs_f64();
    *mean = Some(mean.map_or(value, |mean| mean + WEIGHT * (value - mean)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_count_between_neighbouring_layers_of_one_step_only() {
        let meter = LinkMeter::default();
        let start = Instant::now();
        let at = |layer, step, ms| meter.selecting(LayerId(layer), Step(step), start + Duration::from_millis(ms));
        meter.carried(10, Duration::from_millis(5));
        at(1, 1, 0);
        assert_eq!(meter.rate(), None);
        at(0, 2, 5000);
        at(1, 2, 5008);
        // Layer 2 had no selection.
        at(3, 2, 9000);
        let rate = LinkRate { entry: Duration::from_micros(500), interval: Duration::from_millis(8) };
        assert_eq!(meter.rate(), Some(rate));
        at(4, 2, 9024);
        meter.carried(1, Duration::from_micros(2100));
        let rate = LinkRate { entry: Duration::from_micros(600), interval: Duration::from_millis(9) };
        assert_eq!(meter.rate(), Some(rate));
    }
}
