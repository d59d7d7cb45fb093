//! The few SVG elements that a picture is made of.

use std::fmt::Write;

/// Text colour that is readable on white and on black alike.
pub const INK: &str = "#7a828c";

/// An SVG document in the making; lengths are pixels.
pub struct Svg {
    width: f64,
    body: String,
}

/// Where a text is pinned.
#[derive(Clone, Copy)]
pub enum Anchor {
    /// Its beginning.
    Start,
    /// Its middle.
    Middle,
    /// Its end.
    End,
}

/// How a text looks.
#[derive(Clone, Copy)]
pub struct Font<'a> {
    /// Pixels.
    pub size: f64,
    /// Where it is pinned.
    pub anchor: Anchor,
    /// Fill colour.
    pub color: &'a str,
    /// Whether it is bold.
    pub bold: bool,
}

/// A rectangle.
#[derive(Clone, Copy)]
pub struct Rect {
    /// Left edge.
    pub x: f64,
    /// Upper edge.
    pub y: f64,
    /// Width.
    pub width: f64,
    /// Height.
    pub height: f64,
}

impl Svg {
    /// An empty picture of `width` pixels; its height is known at the end.
    pub fn new(width: f64) -> Self {
        Self { width, body: String::new() }
    }

    /// A filled rectangle; `title` is shown where a pointer rests on it.
    pub fn rect(&mut self, rect: Rect, fill: &str, opacity: f64, title: &str) {
        let Rect { x, y, width, height } = rect;
        let mut element =
            format!("<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{fill}\"");
        if opacity < 1.0 {
            let _ = write!(element, " fill-opacity=\"{opacity}\"");
        }
        match title {
            "" => element.push_str("/>"),
            title => {
                let _ = write!(element, "><title>{}</title></rect>", escape(title));
            }
        }
        self.push(&element);
    }

    /// A thin line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), opacity: f64) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.push(&format!(
            "<line x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\" stroke=\"{INK}\" stroke-opacity=\"{opacity}\"/>"
        ));
    }

    /// A line of text.
    pub fn text(&mut self, x: f64, y: f64, font: Font<'_>, text: &str) {
        let Font { size, anchor, color, bold } = font;
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let weight = if bold { " font-weight=\"600\"" } else { "" };
        self.push(&format!(
            "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{color}\"{weight}>{}</text>",
            escape(text)
        ));
    }

    /// Begins a group of elements that belong to the series `index`.
    pub fn series(&mut self, class: &str, index: usize) {
        self.push(&format!("<g class=\"{class}\" data-series=\"{index}\">"));
    }

    /// Ends the group.
    pub fn end_series(&mut self) {
        self.push("</g>");
    }

    /// A line through points.
    pub fn curve(&mut self, points: &[(f64, f64)], color: &str, dashes: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.2},{y:.2}")).collect();
        let dashes = if dashes.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dashes}\"") };
        self.push(&format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{dashes}/>",
            points.join(" ")
        ));
    }

    /// A thick upright or level line: how far a figure is known.
    pub fn whisker(&mut self, from: (f64, f64), to: (f64, f64), color: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.push(&format!(
            "<line x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\" stroke=\"{color}\" stroke-opacity=\"0.45\" \
             stroke-width=\"1.5\"/>"
        ));
    }

    /// A dot; `title` is shown where a pointer rests on it.
    pub fn dot(&mut self, x: f64, y: f64, color: &str, title: &str) {
        self.push(&format!(
            "<circle cx=\"{x:.2}\" cy=\"{y:.2}\" r=\"4\" fill=\"{color}\"><title>{}</title></circle>",
            escape(title)
        ));
    }

    /// The document.
    pub fn finish(self, height: f64, title: &str) -> String {
        let Self { width, body } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
             height=\"{height:.0}\" role=\"img\" font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\">\n\
             <title>{}</title>\n{body}</svg>\n",
            escape(title)
        )
    }

    fn push(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }
}

/// Text as SVG or HTML content.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
