//! Spans of foreground and background work, written as Chrome trace JSON.

use crate::ids::{LayerId, Step};
use serde_json::json;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The lane a span is drawn in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Track {
    /// The executor's own thread.
    Foreground,
    /// The predict worker.
    Predict,
    /// The select worker.
    Select,
    /// The transfer worker.
    Transfer,
}

impl Track {
    /// All lanes, top to bottom.
    pub const ALL: [Self; 4] = [Self::Foreground, Self::Predict, Self::Select, Self::Transfer];

    /// Lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Foreground => "foreground",
            Self::Predict => "predict",
            Self::Select => "select",
            Self::Transfer => "transfer",
        }
    }
}

/// A stretch of work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Lane.
    pub track: Track,
    /// What was done.
    pub name: &'static str,
    /// Layer it was done for.
    pub layer: LayerId,
    /// Step it was done in.
    pub step: Step,
    /// Microseconds from the tracer's start.
    pub start_us: f64,
    /// Length in microseconds.
    pub duration_us: f64,
}

impl Span {
    /// End, in microseconds from the tracer's start.
    pub fn end_us(&self) -> f64 {
        self.start_us + self.duration_us
    }

    /// Microseconds for which both spans run.
    pub fn overlap_us(&self, other: &Self) -> f64 {
        (self.end_us().min(other.end_us()) - self.start_us.max(other.start_us)).max(0.0)
    }
}

/// Collects spans from all threads; the default one collects nothing and costs nothing.
#[derive(Clone, Default)]
pub struct Tracer(Option<Arc<Sink>>);

struct Sink {
    epoch: Instant,
    spans: Mutex<Vec<Span>>,
}

impl Tracer {
    /// A tracer that collects.
    pub fn recording() -> Self {
        Self(Some(Arc::new(Sink { epoch: Instant::now(), spans: Mutex::default() })))
    }

    /// Whether spans are collected.
    pub fn is_recording(&self) -> bool {
        self.0.is_some()
    }

    /// Adds a span from `start` to now.
    pub fn record(&self, track: Track, name: &'static str, layer: LayerId, step: Step, start: Instant) {
        self.record_between(track, name, layer, step, start, Instant::now());
    }

    /// Adds a span whose end is known: what a device says that it did.
    pub fn record_between(
        &self,
        track: Track,
        name: &'static str,
        layer: LayerId,
        step: Step,
        start: Instant,
        end: Instant,
    ) {
        if let Some(sink) = &self.0 {
            let start_us = start.saturating_duration_since(sink.epoch).as_secs_f64() * 1e6;
            let duration_us = end.saturating_duration_since(start).as_secs_f64() * 1e6;
            let span = Span { track, name, layer, step, start_us, duration_us };
            sink.spans.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(span);
        }
    }

    /// All spans so far, by start.
    pub fn spans(&self) -> Vec<Span> {
        let mut spans = match &self.0 {
            Some(sink) => sink.spans.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone(),
            None => Vec::new(),
        };
        spans.sort_by(|a, b| a.start_us.total_cmp(&b.start_us));
        spans
    }

    /// Writes all spans in the Trace Event Format that `chrome://tracing` and Perfetto open.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_chrome_trace(&self, writer: &mut dyn Write) -> io::Result<()> {
        let names = Track::ALL.map(|track| {
            json!({"ph": "M", "name": "thread_name", "pid": 1, "tid": track as usize, "args": {"name": track.name()}})
        });
        let spans = self.spans().into_iter().map(|span| {
            json!({
                "ph": "X", "pid": 1, "tid": span.track as usize, "name": span.name, "cat": span.track.name(),
                "ts": span.start_us, "dur": span.duration_us,
                "args": {"layer": span.layer.0, "step": span.step.0},
            })
        });
        let events: Vec<_> = names.into_iter().chain(spans).collect();
        serde_json::to_writer(&mut *writer, &json!({"traceEvents": events, "displayTimeUnit": "ms"}))?;
        writer.write_all(b"\n")
    }
}
