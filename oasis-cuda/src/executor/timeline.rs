//! When the device did what: events around the operations of a step, read once it is done.

use super::parts::Parts;
use crate::device::{DeviceError, Event, Stream};
use oasis_core::ids::{LayerId, Step};
use oasis_core::pipeline::{Tracer, Track};
use std::time::{Duration, Instant};

/// An operation between two events.
pub(super) struct Mark {
    track: Track,
    name: &'static str,
    layer: usize,
    start: Event,
    end: Event,
}

impl Parts {
    /// Queues `work` on `stream`, between two events where steps are traced.
    pub fn span(
        &self,
        stream: &Stream,
        track: Track,
        name: &'static str,
        layer: usize,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        if self.marks.borrow().is_none() {
            return work();
        }
        let (start, end) = (self.device.event()?, self.device.event()?);
        stream.record_in_graph(&start)?;
        work()?;
        stream.record_in_graph(&end)?;
        if let Some(marks) = self.marks.borrow_mut().as_mut() {
            marks.push(Mark { track, name, layer, start, end });
        }
        Ok(())
    }
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
