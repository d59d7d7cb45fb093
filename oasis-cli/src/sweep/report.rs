//! The report: one HTML file with pictures, tables and circumstances that needs no network.
//!
//! The pictures are our own SVG, so that the report's script finds series and points in it and the book can show the same
//! files. A plotting library in JavaScript would add between one and four megabytes to every report.

use crate::machine::Machine;
use crate::svg::escape;
use crate::sweep::chart::Chart;
use crate::sweep::file::SweepFile;
use crate::sweep::point::{Finished, Point};
use crate::sweep::table::{Row, Table};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const STYLE: &str = include_str!("../../assets/sweep.css");
const SCRIPT: &str = include_str!("../../assets/sweep.js");

/// The pictures of a sweep, as file names without their ending and SVG: those that its file asks for, else the usual.
pub fn pictures(sweep: &SweepFile, table: &Table) -> Vec<(String, String)> {
    let usual = Chart::usual(table);
    let plots = if sweep.plot.is_empty() { &usual } else { &sweep.plot };
    drawn(table, plots)
}

fn drawn(table: &Table, plots: &[crate::sweep::file::Plot]) -> Vec<(String, String)> {
    let charts = plots.iter().filter_map(|plot| Chart::new(table, plot));
    charts.map(|chart| (chart.name.clone(), chart.draw())).collect()
}

/// The report as HTML. `source` is the text of the sweep's file; `planned` counts all points.
pub fn render(sweep: &SweepFile, source: &str, planned: usize, finished: &[(Point, Finished)]) -> String {
    let table = Table::new(finished);
    let mut body = format!("<h1>{}</h1>\n<p>{}</p>\n", escape(&sweep.title), escape(&sweep.about));
    let _ = writeln!(body, "<p class=\"soft\">{}</p>", escape(&circumstances(planned, finished)));
    figures(&mut body, &pictures(sweep, &table));
    if !sweep.plot.is_empty() {
        let shown: BTreeSet<String> = sweep.plot.iter().map(|plot| plot.name.clone()).collect();
        let more: Vec<_> = Chart::usual(&table).into_iter().filter(|plot| !shown.contains(&plot.name)).collect();
        body.push_str("<details><summary>Every figure</summary>\n");
        figures(&mut body, &drawn(&table, &more));
        body.push_str("</details>\n");
    }
    for command in table.commands() {
        results(&mut body, &table, &command);
    }
    let _ = writeln!(body, "<h2>The sweep</h2>\n<pre>{}</pre>", escape(source.trim_end()));
    let _ = writeln!(
        body,
        "<details><summary>Configuration that all points share</summary>\n<pre>{}</pre></details>",
        escape(&shared(finished))
    );
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n{body}<div id=\"tip\"></div>\n<script>\n{SCRIPT}</script>\n\
         </body>\n</html>\n",
        escape(&sweep.title)
    )
}

fn figures(body: &mut String, pictures: &[(String, String)]) {
    body.push_str("<div class=\"charts\">\n");
    for (name, svg) in pictures {
        let _ = writeln!(body, "<figure data-name=\"{}\">\n{svg}</figure>", escape(name));
    }
    body.push_str("</div>\n");
}

fn described(machine: &Machine) -> String {
    let cpu = format!("{}, {} threads", machine.cpu.as_deref().unwrap_or("CPU not known"), machine.threads);
    std::iter::once(cpu).chain(machine.gpus.iter().cloned()).collect::<Vec<_>>().join(", ")
}

/// How many points there are, from which programs and machines, and when.
fn circumstances(planned: usize, finished: &[(Point, Finished)]) -> String {
    let provenances = || finished.iter().map(|(_, finished)| &finished.provenance);
    let programs: BTreeSet<String> = provenances().map(|p| p.program.name()).collect();
    let machines: BTreeSet<String> = provenances().map(|p| described(&p.machine)).collect();
    let (first, last) =
        (provenances().map(|p| p.finished.as_str()).min(), provenances().map(|p| p.finished.as_str()).max());
    let seconds: f64 = provenances().map(|p| p.seconds).sum();
    let join = |texts: BTreeSet<String>| texts.into_iter().collect::<Vec<_>>().join("; ");
    format!(
        "{} of {planned} points, {seconds:.0} s of measuring, {} to {}. {}. {}.",
        finished.len(),
        first.unwrap_or("-"),
        last.unwrap_or("-"),
        join(programs),
        join(machines)
    )
}

fn results(body: &mut String, table: &Table, command: &str) {
    let (labels, names) = (table.varying(command), table.figures(command));
    let _ =
        writeln!(body, "<h2>{}</h2>\n<div class=\"scroll\"><table class=\"sortable\">\n<thead><tr>", escape(command));
    let rows: Vec<_> = table.rows.iter().filter(|row| row.command == command).collect();
    let is_number =
        |label: &String| rows.iter().all(|row| row.labels.get(label).is_none_or(|value| value.parse::<f64>().is_ok()));
    let numbers: Vec<bool> = labels.iter().map(is_number).chain(names.iter().map(|_| true)).collect();
    for (name, number) in labels.iter().chain(&names).zip(&numbers) {
        let class = if *number { " class=\"number\"" } else { "" };
        let _ = write!(body, "<th{class}>{}</th>", escape(name));
    }
    body.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        body.push_str("<tr>");
        for (label, number) in labels.iter().zip(&numbers) {
            let class = if *number { " class=\"number\"" } else { "" };
            let _ = write!(body, "<td{class}>{}</td>", escape(row.labels.get(label).map_or("", String::as_str)));
        }
        for name in &names {
            body.push_str(&cell(row, name));
        }
        body.push_str("</tr>\n");
    }
    body.push_str("</tbody></table></div>\n");
}

/// A figure with its bounds, where it has some; it is sorted by the figure.
fn cell(row: &Row, name: &str) -> String {
    let Some(figure) = row.figures.get(name) else { return "<td class=\"number\"></td>".to_owned() };
    let bound = |end: &str| row.figures.get(&format!("{name}_{end}")).copied().map(rounded);
    let bounds = bound("low").zip(bound("high"));
    let bounds = bounds.map_or_else(String::new, |(low, high)| format!(" ({low} to {high})"));
    format!("<td class=\"number\" data-value=\"{figure}\">{}{bounds}</td>", rounded(*figure))
}

/// Whole numbers as they are, others with about four digits.
fn rounded(figure: f64) -> String {
    match figure {
        whole if whole.fract() == 0.0 => format!("{whole:.0}"),
        large if large.abs() >= 100.0 => format!("{large:.1}"),
        small => format!("{small:.4}"),
    }
}

/// `key = value` lines of what every point has alike.
fn shared(finished: &[(Point, Finished)]) -> String {
    let Some((_, first)) = finished.first() else { return String::new() };
    let mut shared: BTreeMap<_, _> = first.config.iter().collect();
    shared.retain(|key, value| finished.iter().all(|(_, finished)| finished.config.get(*key) == Some(*value)));
    shared.into_iter().map(|(key, value)| format!("{key} = {value}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::table::tests::finished;
    use serde_json::json;

    #[test]
    fn a_cell_has_the_bounds_of_its_figure_and_sorts_by_the_figure() {
        let sweep: SweepFile = toml::from_str("title = \"t\"\nmeasure = [{ command = \"eval a\" }]").unwrap();
        let result = json!([{"policy": "x", "ratio": 1.0314, "ratio_low": 1.009, "ratio_high": 1.0541, "steps": 3}]);
        let report = render(&sweep, "", 1, &[finished("eval a", "k", 1.0, result)]);
        assert!(
            report.contains("<td class=\"number\" data-value=\"1.0314\">1.0314 (1.0090 to 1.0541)</td>"),
            "{report}"
        );
        assert!(report.contains("<td class=\"number\" data-value=\"3\">3</td>"), "{report}");
        assert!(!report.contains("<th class=\"number\">ratio_low</th>"), "{report}");
    }
}
