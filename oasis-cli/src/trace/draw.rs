//! The picture of one decode step: a lane for the foreground and one a stage, rectangles coloured by layer.

use crate::svg::{Anchor, Font, INK, Rect, Svg};
use crate::trace::file::Span;
use crate::trace::step::{DecodeStep, Hidden};
use oasis_core::pipeline::Track;
use std::ops::Range;

const WIDTH: f64 = 900.0;
/// Left and right edge of the time axis.
const PLOT: Range<f64> = 88.0..890.0;
const LANE: f64 = 30.0;
const LANE_GAP: f64 = 7.0;
/// Colours in turn over the layers; dark enough for white text on them, bright enough for a dark page.
const COLORS: [&str; 6] = ["#3b73af", "#c96a1b", "#3f8f4b", "#c2453f", "#8a5a9e", "#2b8f8a"];
const NEUTRAL: &str = "#8b949e";
/// More layers than this are too narrow to tell apart: some of them are drawn once more, enlarged.
const ENLARGE_FROM: u32 = 9;
const ENLARGED_LAYERS: u32 = 4;

/// A text of `size` pixels at its beginning.
const fn font(size: f64) -> Font<'static> {
    Font { size, anchor: Anchor::Start, color: INK, bold: false }
}

/// Draws a step as SVG. `subject` says what was run.
pub fn draw(step: &DecodeStep, subject: &str) -> String {
    let mut svg = Svg::new(WIDTH);
    let heading =
        format!("Decode step {}: {} layers in {:.2} ms{subject}", step.number, step.layers, step.length / 1e3);
    svg.text(10.0, 20.0, Font { bold: true, ..font(14.0) }, &heading);
    svg.text(10.0, 38.0, font(12.0), &sentence(&step.hidden()));

    let whole = Panel { top: 52.0, time: 0.0..step.length, labels: false };
    whole.draw(&mut svg, step);
    let mut bottom = whole.axis_bottom();
    if step.layers >= ENLARGE_FROM {
        let first = (step.layers - ENLARGED_LAYERS) / 2;
        if let Some(time) = step.stretch(first..first + ENLARGED_LAYERS) {
            let panel = Panel { top: bottom + 34.0, time, labels: true };
            magnify(&mut svg, &whole, &panel);
            panel.draw(&mut svg, step);
            bottom = panel.axis_bottom();
        }
    }
    legend(&mut svg, bottom + 12.0, step.layers);
    svg.finish(bottom + 54.0, &heading)
}

/// What the picture shows, in numbers.
fn sentence(hidden: &Hidden) -> String {
    let Hidden { busy, under_own_layer, under_other_layers, waited } = *hidden;
    let share = |part: f64| if busy > 0.0 { 100.0 * part / busy } else { 0.0 };
    format!(
        "The stages work {:.2} ms: {:.0}% under the foreground's work on the same layer, {:.0}% under other layers; \
         the foreground waits {:.2} ms.",
        busy / 1e3,
        share(under_own_layer),
        share(under_other_layers),
        waited / 1e3
    )
}

/// A stretch of time over the four lanes.
struct Panel {
    top: f64,
    /// Microseconds.
    time: Range<f64>,
    /// Whether rectangles say what they are.
    labels: bool,
}

impl Panel {
    fn x(&self, time: f64) -> f64 {
        PLOT.start + (time - self.time.start) / (self.time.end - self.time.start) * (PLOT.end - PLOT.start)
    }

    fn lane_top(&self, track: Track) -> f64 {
        self.top + track as usize as f64 * (LANE + LANE_GAP)
    }

    fn lanes_bottom(&self) -> f64 {
        self.lane_top(Track::Transfer) + LANE
    }

    /// Where the axis with its numbers ends.
    fn axis_bottom(&self) -> f64 {
        self.lanes_bottom() + 26.0
    }

    fn draw(&self, svg: &mut Svg, step: &DecodeStep) {
        self.axis(svg);
        for track in Track::ALL {
            let top = self.lane_top(track);
            let lane = Rect { x: PLOT.start, y: top, width: PLOT.end - PLOT.start, height: LANE };
            svg.rect(lane, NEUTRAL, 0.1, "");
            let font = Font { anchor: Anchor::End, ..font(13.0) };
            svg.text(PLOT.start - 8.0, top + LANE / 2.0 + 4.5, font, track.name());
        }
        for span in step.spans.iter().filter(|s| s.start < self.time.end && s.end > self.time.start) {
            self.span(svg, span);
        }
    }

    fn span(&self, svg: &mut Svg, span: &Span) {
        let (left, right) = (self.x(span.start.max(self.time.start)), self.x(span.end.min(self.time.end)));
        // What is shorter than a pixel would vanish.
        let width = (right - left).max(0.8);
        // Attention stands out among the foreground's work.
        let inset = if span.is_work() && span.name != "attention" { 6.0 } else { 0.0 };
        let top = self.lane_top(span.track) + inset;
        let title = format!("{}, layer {}: {:.3} ms", span.name, span.layer, span.length() / 1e3);
        svg.rect(Rect { x: left, y: top, width, height: LANE - 2.0 * inset }, color(span), 1.0, &title);
        if self.labels {
            let full = match span.track {
                Track::Foreground => format!("{} {}", span.name, span.layer),
                _ => format!("layer {}", span.layer),
            };
            let number = span.layer.to_string();
            // About 6 pixels a character at this size.
            if let Some(label) = [full, number].iter().find(|label| label.len() as f64 * 6.0 + 3.0 < width) {
                let font = Font { size: 11.0, anchor: Anchor::Middle, color: "#ffffff", bold: false };
                svg.text(left + width / 2.0, self.lane_top(span.track) + LANE / 2.0 + 4.0, font, label);
            }
        }
    }

    fn axis(&self, svg: &mut Svg) {
        let bottom = self.lanes_bottom();
        let (start, end) = (self.time.start / 1e3, self.time.end / 1e3);
        let tick = tick(end - start);
        let first = (start / tick).ceil() as u64;
        for index in (first..).take_while(|&index| index as f64 * tick <= end) {
            let time = index as f64 * tick;
            let x = self.x(time * 1e3);
            svg.line((x, self.top), (x, bottom + 5.0), 0.35);
            let decimals = if tick >= 1.0 {
                0
            } else if tick >= 0.1 {
                1
            } else {
                2
            };
            // The unit stands at the end of the axis.
            if x < PLOT.end - 40.0 {
                let font = Font { anchor: Anchor::Middle, ..font(11.0) };
                svg.text(x, bottom + 17.0, font, &format!("{time:.decimals$}"));
            }
        }
        svg.text(PLOT.end, bottom + 17.0, Font { anchor: Anchor::End, ..font(11.0) }, "ms");
    }
}

/// Lines from the stretch of the upper panel to the edges of the lower one.
fn magnify(svg: &mut Svg, upper: &Panel, lower: &Panel) {
    let from = upper.lanes_bottom();
    for (time, edge) in [(lower.time.start, PLOT.start), (lower.time.end, PLOT.end)] {
        let x = upper.x(time);
        svg.line((x, upper.top), (x, from), 0.9);
        svg.line((x, from), (edge, lower.top), 0.9);
    }
}

fn legend(svg: &mut Svg, top: f64, layers: u32) {
    let mut x = PLOT.start;
    for (index, color) in COLORS.iter().enumerate().take(layers as usize) {
        let label = match layers as usize > index + COLORS.len() {
            true => format!("{index}, {}, …", index + COLORS.len()),
            false => index.to_string(),
        };
        svg.rect(Rect { x, y: top, width: 14.0, height: 12.0 }, color, 1.0, "");
        svg.text(x + 19.0, top + 10.5, font(12.0), &label);
        x += 33.0 + 6.5 * label.chars().count() as f64;
    }
    svg.text(PLOT.start - 8.0, top + 10.5, Font { anchor: Anchor::End, ..font(12.0) }, "layer");
    let row = top + 20.0;
    svg.text(PLOT.start - 8.0, row + 10.5, Font { anchor: Anchor::End, ..font(12.0) }, "foreground");
    let mut x = PLOT.start;
    for (inset, fill, label) in [
        (0.0, COLORS[0], "attention"),
        (3.0, COLORS[0], "qkv before it, output + mlp after it"),
        (3.0, NEUTRAL, "draft head"),
        (0.0, NEUTRAL, "wait"),
    ] {
        svg.rect(Rect { x, y: row - 1.0 + inset, width: 14.0, height: 14.0 - 2.0 * inset }, fill, 1.0, "");
        svg.text(x + 19.0, row + 10.5, font(12.0), label);
        x += 42.0 + 5.7 * label.len() as f64;
    }
    svg.text(x, row + 10.5, font(12.0), "blank: not traced, such as logits");
}

/// Colour of a span: its layer's, or none of them where it belongs to no layer.
fn color(span: &Span) -> &'static str {
    match span.is_wait() || span.name == "draft head" {
        true => NEUTRAL,
        false => COLORS[span.layer as usize % COLORS.len()],
    }
}

/// A round distance in milliseconds that cuts `length` into 5 to 12 parts.
fn tick(length: f64) -> f64 {
    let coarse = 10_f64.powf((length / 5.0).max(1e-3).log10().floor());
    [5.0, 2.0, 1.0].into_iter().map(|factor| factor * coarse).find(|tick| length / tick >= 5.0).unwrap_or(coarse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        for length in [0.3, 0.9, 1.0, 2.2, 9.9, 20.6, 73.0, 1234.0] {
            let parts = length / tick(length);
            assert!((5.0..13.0).contains(&parts), "{length}: {parts}");
        }
    }

    #[test]
    fn colours_follow_the_layer_and_repeat() {
        let span = |name: &str, layer| Span {
            track: Track::Foreground,
            name: name.to_owned(),
            layer,
            step: 1,
            start: 0.0,
            end: 1.0,
        };
        assert_eq!(color(&span("attention", 1)), color(&span("qkv", 7)));
        assert_ne!(color(&span("attention", 1)), color(&span("attention", 2)));
        assert_eq!(color(&span("draft head", 1)), NEUTRAL);
    }
}
