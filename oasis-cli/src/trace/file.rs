//! A recorded trace: the spans of `oasis run --trace`, read back from the Trace Event Format.

use crate::error::{CliError, CliResult};
use oasis_core::pipeline::Track;
use serde::Deserialize;
use std::path::Path;

/// A stretch of work, as it was recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// Lane.
    pub track: Track,
    /// What was done.
    pub name: String,
    /// Layer it was done for.
    pub layer: u32,
    /// Step it was done in; 0 before the first decode step.
    pub step: u64,
    /// Start in microseconds.
    pub start: f64,
    /// End in microseconds.
    pub end: f64,
}

impl Span {
    /// Whether the foreground only waited.
    pub fn is_wait(&self) -> bool {
        self.track == Track::Foreground && self.name == "wait"
    }

    /// Whether the foreground computed.
    pub fn is_work(&self) -> bool {
        self.track == Track::Foreground && self.name != "wait"
    }

    /// Length in microseconds.
    pub fn length(&self) -> f64 {
        self.end - self.start
    }
}

/// All spans of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// In the order of the file.
    pub spans: Vec<Span>,
}

#[derive(Deserialize)]
struct Document {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

/// Events of other programs may lack anything but `ph`.
#[derive(Deserialize)]
struct Event {
    ph: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    cat: String,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Args,
}

#[derive(Deserialize, Default)]
struct Args {
    layer: Option<u32>,
    step: Option<u64>,
}

impl Event {
    fn span(self) -> Option<Span> {
        let track = Track::ALL.into_iter().find(|track| self.ph == "X" && track.name() == self.cat)?;
        let Args { layer, step } = self.args;
        Some(Span { track, name: self.name, layer: layer?, step: step?, start: self.ts, end: self.ts + self.dur })
    }
}

impl Recording {
    /// Reads a file that `oasis run --trace` wrote.
    ///
    /// # Errors
    /// When it cannot be read or is something else.
    pub fn read(path: &Path) -> CliResult<Self> {
        let wrong = |found: String| {
            CliError::input(
                format!("{}: expected a trace that `oasis run --trace FILE` wrote, found {found}", path.display()),
                "oasis run --trace overlap.trace.json, then oasis trace draw overlap.trace.json -o overlap.svg",
            )
        };
        let text = std::fs::read(path).map_err(|error| wrong(format!("none: {error}")))?;
        let document: Document =
            serde_json::from_slice(&text).map_err(|error| wrong(format!("other JSON or none: {error}")))?;
        let spans: Vec<Span> = document.events.into_iter().filter_map(Event::span).collect();
        if spans.is_empty() {
            return Err(wrong("no spans of ours".to_owned()));
        }
        Ok(Self { spans })
    }

    /// Numbers of the decode steps, in order.
    pub fn steps(&self) -> Vec<u64> {
        let mut steps: Vec<u64> = self.spans.iter().filter(|s| s.is_work() && s.step > 0).map(|s| s.step).collect();
        steps.sort_unstable();
        steps.dedup();
        steps
    }
}
