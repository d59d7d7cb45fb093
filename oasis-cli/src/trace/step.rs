//! One decode step of a trace, and how much of the background's work it hid.

use crate::error::{CliError, CliResult};
use crate::trace::file::{Recording, Span};
use oasis_core::pipeline::Track;

/// Everything that ran between the beginning of a step and the beginning of the next.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeStep {
    /// Number of the step.
    pub number: u64,
    /// Length in microseconds.
    pub length: f64,
    /// Layers of the model.
    pub layers: u32,
    /// Spans that touch the step, in microseconds from its beginning and cut to it.
    pub spans: Vec<Span>,
}

/// Where the background's time went, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Hidden {
    /// All three stages together.
    pub busy: f64,
    /// Of that, while the foreground computed the same layer.
    pub under_own_layer: f64,
    /// Of that, while it computed another layer or ran the draft head.
    pub under_other_layers: f64,
    /// The foreground's waits.
    pub waited: f64,
}

impl DecodeStep {
    /// The step of that number, or a middle one.
    ///
    /// # Errors
    /// When the trace does not have it, or has no decode step at all.
    pub fn choose(recording: &Recording, number: Option<u64>) -> CliResult<Self> {
        let steps = recording.steps();
        let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
            return Err(CliError::input(
                "the trace: expected at least one decode step, found a prefill only",
                "let `oasis run` generate more than one token: -n 16",
            ));
        };
        let number = number.unwrap_or(steps[steps.len() / 2]);
        if steps.binary_search(&number).is_err() {
            return Err(CliError::Input(format!("--step: expected a step from {first} to {last}, found {number}")));
        }
        Ok(Self::cut(recording, number))
    }

    fn cut(recording: &Recording, number: u64) -> Self {
        let work_of = |step: u64| recording.spans.iter().filter(move |span| span.is_work() && span.step == step);
        let earliest = |spans: &mut dyn Iterator<Item = &Span>| spans.map(|s| s.start).reduce(f64::min);
        let start = earliest(&mut work_of(number)).expect("the step was found by its work");
        // Logits and sampling, which are not traced, lie between the last span of a step and the first of the next.
        let end = earliest(&mut recording.spans.iter().filter(|s| s.is_work() && s.step > number))
            .unwrap_or_else(|| work_of(number).map(|span| span.end).fold(start, f64::max));
        let inside = recording.spans.iter().filter(|span| span.start < end && span.end > start);
        let spans = inside
            .map(|span| Span { start: span.start.max(start) - start, end: span.end.min(end) - start, ..span.clone() })
            .collect();
        let layers = recording.spans.iter().map(|span| span.layer + 1).max().unwrap_or(0);
        Self { number, length: end - start, layers, spans }
    }

    /// What the step hid of the background's work.
    pub fn hidden(&self) -> Hidden {
        let mut hidden = Hidden::default();
        let (foreground, background): (Vec<&Span>, Vec<&Span>) =
            self.spans.iter().partition(|span| span.track == Track::Foreground);
        hidden.waited = foreground.iter().filter(|span| span.is_wait()).map(|span| span.length()).sum();
        for stage in background {
            hidden.busy += stage.length();
            for work in foreground.iter().filter(|span| span.is_work()) {
                let overlap = (stage.end.min(work.end) - stage.start.max(work.start)).max(0.0);
                match work.layer == stage.layer && work.name != "draft head" {
                    true => hidden.under_own_layer += overlap,
                    false => hidden.under_other_layers += overlap,
                }
            }
        }
        hidden
    }

    /// Stretch of the step in which the foreground runs `layers`; `None` where it runs none of them.
    pub fn stretch(&self, layers: std::ops::Range<u32>) -> Option<std::ops::Range<f64>> {
        let work = || self.spans.iter().filter(|s| s.is_work() && s.name != "draft head" && layers.contains(&s.layer));
        let start = work().map(|span| span.start).reduce(f64::min)?;
        Some(start..work().map(|span| span.end).fold(start, f64::max))
    }
}
