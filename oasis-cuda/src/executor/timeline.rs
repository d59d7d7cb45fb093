//! When the device did what: events around the operations of a step, read once it is done.

use crate::device::{DeviceError, Event};
use oasis_core::ids::{LayerId, Step};
use oasis_core::pipeline::{Tracer, Track};
use std::time::{Duration, Instant};

/// An operation between two events.
pub(super) struct Mark {
    pub track: Track,
    pub name: &'static str,
    pub layer: usize,
    pub start: Event,
    pub end: Event,
}

/// Adds the spans of a step that is done; `launched` is when the host handed it over.
pub(super) fn record(tracer: &Tracer, marks: &[Mark], step: u64, launched: Instant) -> Result<(), DeviceError> {
    let Some(first) = marks.first() else { return Ok(()) };
    let at = |event: &Event| -> Result<Instant, DeviceError> {
        Ok(launched + Duration::from_secs_f64(first.start.micros_until(event)?.max(0.0) / 1e6))
    };
    for mark in marks {
        let (start, end) = (at(&mark.start)?, at(&mark.end)?);
        tracer.record_between(mark.track, mark.name, LayerId::from(mark.layer), Step(step), start, end);
    }
    Ok(())
}
