//! One picture: figures as lines over an axis of the grid or over another figure, or as a bar for each point.

use crate::svg::{Anchor, Font, INK, Rect, Svg};
use crate::sweep::file::Plot;
use crate::sweep::table::{Row, Table};
use std::collections::BTreeSet;
use std::ops::Range;

const WIDTH: f64 = 760.0;
const PLOT: Range<f64> = 78.0..736.0;
const TOP: f64 = 44.0;
const HEIGHT: f64 = 300.0;
const COLORS: [&str; 8] = ["#3b73af", "#c96a1b", "#3f8f4b", "#c2453f", "#8a5a9e", "#2b8f8a", "#a07d10", "#c0568f"];
/// Beyond the colours lines are told apart by their dashes.
const DASHES: [&str; 3] = ["", "7 4", "2 3"];
/// Values that span more than this factor are drawn on a logarithmic axis.
const LOGARITHMIC_FROM: f64 = 20.0;
/// About the width of a character of the labels, pixels.
const CHARACTER: f64 = 6.3;

/// A picture in numbers.
pub struct Chart {
    /// File name without its ending.
    pub name: String,
    title: String,
    x: Option<String>,
    y: String,
    series: Vec<Series>,
}

struct Series {
    name: String,
    points: Vec<Mark>,
}

struct Mark {
    x: f64,
    y: f64,
    /// Bounds of the figure, where the measurement gave them.
    bounds: Option<(f64, f64)>,
}

impl Chart {
    /// The picture that `plot` describes; `None` where no row has its figures.
    pub fn new(table: &Table, plot: &Plot) -> Option<Self> {
        let first = table.commands().into_iter().find(|command| !table.figures(command).is_empty());
        let command = plot.command.clone().or(first)?;
        let rows = || table.rows.iter().filter(|row| row.command == command && row.figures.contains_key(&plot.y));
        let names: Vec<String> =
            table.varying(&command).into_iter().filter(|label| Some(label) != plot.x.as_ref()).collect();
        let mut series: Vec<Series> = Vec::new();
        for row in rows() {
            let x = match &plot.x {
                None => 0.0,
                Some(x) => match value(row, x) {
                    Some(x) => x,
                    None => continue,
                },
            };
            let name = name(row, &names);
            let bound = |end: &str| row.figures.get(&format!("{}_{end}", plot.y)).copied();
            let mark = Mark { x, y: row.figures[&plot.y], bounds: bound("low").zip(bound("high")) };
            match series.iter_mut().find(|series| series.name == name) {
                Some(series) => series.points.push(mark),
                None => series.push(Series { name, points: vec![mark] }),
            }
        }
        series.iter_mut().for_each(|series| series.points.sort_by(|a, b| a.x.total_cmp(&b.x)));
        let over = plot.x.as_ref().map_or_else(String::new, |x| format!(" over {x}"));
        let title = plot.title.clone().unwrap_or_else(|| format!("{}{over}", plot.y));
        let chart = Self { name: plot.name.clone(), title, x: plot.x.clone(), y: plot.y.clone(), series };
        (!chart.series.is_empty()).then_some(chart)
    }

    /// Pictures of every figure of every command, over the axis of numbers that has the most of them.
    pub fn usual(table: &Table) -> Vec<Plot> {
        let mut plots = Vec::new();
        for command in table.commands() {
            let distinct = |label: &String| {
                let rows = table.rows.iter().filter(|row| row.command == command);
                let values: Option<BTreeSet<String>> =
                    rows.map(|row| value(row, label).map(|value| value.to_string())).collect();
                values.map_or(0, |values| values.len())
            };
            let x = table.varying(&command).into_iter().max_by_key(distinct).filter(|label| distinct(label) > 1);
            plots.extend(table.figures(&command).into_iter().map(|y| Plot {
                name: format!("{}-{y}", command.replace(' ', "-")),
                title: Some(format!("{command}: {y}")),
                command: Some(command.clone()),
                x: x.clone(),
                y,
            }));
        }
        plots
    }

    /// As SVG. Elements of one series are in groups with the same `data-series`.
    pub fn draw(&self) -> String {
        let mut svg = Svg::new(WIDTH);
        svg.text(10.0, 20.0, Font { size: 14.0, anchor: Anchor::Start, color: INK, bold: true }, &self.title);
        let bottom = match &self.x {
            Some(x) => self.lines(&mut svg, x),
            None => self.bars(&mut svg),
        };
        svg.finish(bottom, &self.title)
    }

    fn values(&self, of: impl Fn(&Mark) -> Vec<f64>) -> Vec<f64> {
        self.series.iter().flat_map(|series| &series.points).flat_map(of).filter(|value| value.is_finite()).collect()
    }

    fn lines(&self, svg: &mut Svg, x_label: &str) -> f64 {
        let bottom = TOP + HEIGHT;
        let x = Scale::new(&self.values(|mark| vec![mark.x]), PLOT, true);
        let with_bounds = |mark: &Mark| mark.bounds.map_or(vec![mark.y], |(low, high)| vec![low, mark.y, high]);
        let y = Scale::new(&self.values(with_bounds), bottom..TOP, false);
        for (value, text) in y.ticks() {
            let at = y.at(value);
            svg.line((PLOT.start, at), (PLOT.end, at), 0.25);
            svg.text(PLOT.start - 8.0, at + 4.0, font(11.0, Anchor::End), &text);
        }
        for (value, text) in x.ticks() {
            let at = x.at(value);
            svg.line((at, bottom), (at, bottom + 5.0), 0.6);
            svg.text(at, bottom + 18.0, font(11.0, Anchor::Middle), &text);
        }
        svg.line((PLOT.start, bottom), (PLOT.end, bottom), 0.6);
        svg.text(PLOT.start, TOP - 8.0, font(11.0, Anchor::Start), &self.y);
        svg.text(PLOT.end, bottom + 36.0, font(11.0, Anchor::End), x_label);
        for (index, series) in self.series.iter().enumerate() {
            let (color, dashes) = (COLORS[index % COLORS.len()], DASHES[index / COLORS.len() % DASHES.len()]);
            svg.series("series", index);
            let points: Vec<(f64, f64)> = series.points.iter().map(|mark| (x.at(mark.x), y.at(mark.y))).collect();
            svg.curve(&points, color, dashes);
            for (mark, &(left, top)) in series.points.iter().zip(&points) {
                if let Some((low, high)) = mark.bounds {
                    svg.whisker((left, y.at(low)), (left, y.at(high)), color);
                }
                let place = format!("{x_label} {}\n{} {}", short(mark.x), self.y, known(mark));
                let title = if series.name.is_empty() { place } else { format!("{}\n{place}", series.name) };
                svg.dot(left, top, color, &title);
            }
            svg.end_series();
        }
        self.legend(svg, bottom + 44.0)
    }

    /// Names of the series in as many columns as fit; returns the lower edge.
    fn legend(&self, svg: &mut Svg, top: f64) -> f64 {
        if self.series.len() < 2 {
            return top;
        }
        let longest = self.series.iter().map(|series| series.name.chars().count()).max().unwrap_or(0) as f64;
        let width = longest * CHARACTER + 40.0;
        let columns = ((PLOT.end - 10.0) / width).floor().max(1.0) as usize;
        let rows = self.series.len().div_ceil(columns);
        for (index, series) in self.series.iter().enumerate() {
            let (left, top) = (10.0 + (index / rows) as f64 * width, top + 14.0 + (index % rows) as f64 * 19.0);
            let (color, dashes) = (COLORS[index % COLORS.len()], DASHES[index / COLORS.len() % DASHES.len()]);
            svg.series("key", index);
            svg.curve(&[(left, top - 4.0), (left + 22.0, top - 4.0)], color, dashes);
            svg.text(left + 28.0, top, font(11.5, Anchor::Start), &series.name);
            svg.end_series();
        }
        top + 14.0 + rows as f64 * 19.0
    }

    fn bars(&self, svg: &mut Svg) -> f64 {
        let longest = self.series.iter().map(|series| series.name.chars().count()).max().unwrap_or(0) as f64;
        let left = (longest * CHARACTER + 24.0).clamp(PLOT.start, WIDTH * 0.55);
        let fits = ((left - 24.0) / CHARACTER) as usize;
        let mut values = self.values(|mark| mark.bounds.map_or(vec![mark.y], |(_, high)| vec![mark.y, high]));
        values.push(0.0);
        let scale = Scale::new(&values, left..WIDTH - 70.0, false);
        let marks = self.series.iter().flat_map(|series| series.points.iter().map(move |mark| (series, mark)));
        let mut top = TOP;
        svg.text(left, TOP - 8.0, font(11.0, Anchor::Start), &self.y);
        for (index, (series, mark)) in marks.enumerate() {
            let name = match series.name.chars().count() > fits {
                true => format!("{}...", series.name.chars().take(fits.saturating_sub(3)).collect::<String>()),
                false => series.name.clone(),
            };
            svg.series("series", index);
            svg.text(left - 8.0, top + 13.0, font(11.5, Anchor::End), &name);
            let (from, to) = (scale.at(mark.y.min(0.0)), scale.at(mark.y.max(0.0)));
            let bar = Rect { x: from, y: top + 2.0, width: (to - from).max(1.0), height: 14.0 };
            svg.rect(bar, COLORS[0], 0.85, &format!("{}\n{} {}", series.name, self.y, known(mark)));
            let mut end = to;
            if let Some((low, high)) = mark.bounds {
                svg.whisker((scale.at(low), top + 9.0), (scale.at(high), top + 9.0), INK);
                end = end.max(scale.at(high));
            }
            svg.text(end + 6.0, top + 13.0, font(11.0, Anchor::Start), &short(mark.y));
            svg.end_series();
            top += 21.0;
        }
        svg.line((scale.at(0.0), TOP), (scale.at(0.0), top), 0.6);
        top + 8.0
    }
}

/// A label or a figure as a number.
fn value(row: &Row, name: &str) -> Option<f64> {
    row.figures.get(name).copied().or_else(|| row.labels.get(name)?.parse().ok())
}

/// What tells a series from the others: texts as they are, numbers with the last part of their key.
fn name(row: &Row, labels: &[String]) -> String {
    let parts = labels.iter().filter_map(|label| {
        let value = row.labels.get(label)?;
        let key = label.rsplit('.').next().unwrap_or(label).trim_start_matches('-');
        Some(if value.parse::<f64>().is_ok() { format!("{key}={value}") } else { value.clone() })
    });
    parts.collect::<Vec<_>>().join(", ")
}

const fn font(size: f64, anchor: Anchor) -> Font<'static> {
    Font { size, anchor, color: INK, bold: false }
}

/// A number in at most about six characters.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        size if size >= 1e9 => return format!("{value:.2e}"),
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        size if size >= 1e-3 => 4,
        _ => return format!("{value:.1e}"),
    };
    let text = format!("{value:.digits$}");
    if digits == 0 { text } else { text.trim_end_matches('0').trim_end_matches('.').to_owned() }
}

/// A figure with its bounds.
fn known(mark: &Mark) -> String {
    match mark.bounds {
        None => short(mark.y),
        Some((low, high)) => format!("{} ({} to {})", short(mark.y), short(low), short(high)),
    }
}

/// From values to pixels.
struct Scale {
    values: Range<f64>,
    pixels: Range<f64>,
    logarithmic: bool,
}

impl Scale {
    /// Fits `values`; `may_be_logarithmic` where they are positive and far apart.
    fn new(values: &[f64], pixels: Range<f64>, may_be_logarithmic: bool) -> Self {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if may_be_logarithmic && least > 0.0 && most / least >= LOGARITHMIC_FROM {
            // A little room, so that no dot lies on the edge.
            return Self { values: least / 1.15..most * 1.15, pixels, logarithmic: true };
        }
        // From zero where the values are not all far from it.
        let from = if least >= 0.0 && least < 0.6 * most { 0.0 } else { least };
        let room = if most > from { (most - from) * 0.06 } else { most.abs().max(1.0) * 0.1 };
        let below = if from == 0.0 { 0.0 } else { room };
        Self { values: from - below..most + room, pixels, logarithmic: false }
    }

    fn at(&self, value: f64) -> f64 {
        let place = |value: f64| if self.logarithmic { value.ln() } else { value };
        let (from, to) = (place(self.values.start), place(self.values.end));
        self.pixels.start + (place(value) - from) / (to - from) * (self.pixels.end - self.pixels.start)
    }

    /// Round values within, with their texts.
    fn ticks(&self) -> Vec<(f64, String)> {
        let round = |value: f64| (value, short(value));
        if self.logarithmic {
            let decades = self.values.start.log10().floor() as i32..=self.values.end.log10().ceil() as i32;
            let values = decades.flat_map(|decade| [1.0, 2.0, 5.0].map(|step| step * 10_f64.powi(decade)));
            return values.filter(|value| self.values.contains(value)).map(round).collect();
        }
        let rough = (self.values.end - self.values.start) / 6.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.values.start / step).ceil() as i64;
        let values = (first..).map(|index| index as f64 * step).take_while(|value| *value <= self.values.end);
        // As many digits as tell neighbours apart.
        let digits = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
        values.map(|value| (value, format!("{value:.digits$}"))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::table::tests::finished;
    use serde_json::json;

    #[test]
    fn lines_are_drawn_over_a_logarithmic_axis_with_their_bounds() {
        let points = [0.01, 0.1, 1.0].map(|ratio| {
            let row = |policy: &str, share: f64| json!({"policy": policy, "share": share, "share_low": share - 0.1, "share_high": share + 0.1});
            finished("eval a", "selector.fetch_ratio", ratio, json!([row("x", ratio / 2.0), row("a <b>", 0.2)]))
        });
        let table = Table::new(&points);
        let plots = Chart::usual(&table);
        assert_eq!((plots.len(), plots[0].name.as_str()), (1, "eval-a-share"));
        assert_eq!(plots[0].x.as_deref(), Some("selector.fetch_ratio"));
        let svg = Chart::new(&table, &plots[0]).unwrap().draw();
        assert_eq!(svg.matches("<circle").count(), 6);
        assert_eq!(svg.matches("class=\"key\"").count(), 2);
        assert!(svg.contains(">0.01</text>") && svg.contains(">0.5</text>"), "{svg}");
        assert!(svg.contains("a &lt;b&gt;\nselector.fetch_ratio 0.1\nshare 0.2 (0.1 to 0.3)"), "{svg}");
    }

    #[test]
    fn without_an_axis_of_numbers_there_are_bars() {
        let points = [finished("eval a", "k", 1.0, json!([{"policy": "x", "share": 2}, {"policy": "y", "share": 1}]))];
        let table = Table::new(&points);
        let plots = Chart::usual(&table);
        assert_eq!(plots[0].x, None);
        let svg = Chart::new(&table, &plots[0]).unwrap().draw();
        let widths: Vec<f64> = svg
            .split("<rect ")
            .skip(1)
            .map(|rect| rect.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
            .collect();
        assert!((widths[0] / widths[1] - 2.0).abs() < 1e-3, "{widths:?}");
    }

    #[test]
    fn a_figure_that_nobody_measured_has_no_picture() {
        let table = Table::new(&[finished("eval a", "k", 1.0, json!({"share": 2}))]);
        let plot = Plot { name: "n".to_owned(), title: None, command: None, x: None, y: "none".to_owned() };
        assert!(Chart::new(&table, &plot).is_none());
    }

    #[test]
    fn numbers_are_short() {
        let texts = [0.0, 0.05, 1.5, 12.25, 123.4, 98_765.0, 1e-5].map(short);
        assert_eq!(texts, ["0", "0.05", "1.5", "12.2", "123", "98765", "1.0e-5"]);
    }

    #[test]
    fn ticks_are_round_and_within() {
        let scale = Scale { values: 0.0..1.06, pixels: 0.0..100.0, logarithmic: false };
        let texts: Vec<String> = scale.ticks().into_iter().map(|(_, text)| text).collect();
        assert_eq!(texts, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
    }
}
