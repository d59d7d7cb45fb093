//! What `[[plot]]` asks for, checked before an hour is spent on measuring.

use crate::error::{CliError, CliResult};
use crate::sweep::file::{Plot, SweepFile};
use crate::sweep::point::{Finished, Point};
use crate::sweep::table::Table;
use serde_json::Value;
use std::collections::BTreeSet;

/// Plots whose figures no finished point has shown yet.
pub struct Unseen<'a> {
    /// The sweep's file.
    name: &'a str,
    /// Commands and plots.
    plots: Vec<(&'a str, &'a Plot)>,
    /// All points of the sweep.
    points: &'a [Point],
}

impl<'a> Unseen<'a> {
    /// All plots of a sweep with these points; `name` is that of its file.
    pub fn new(name: &'a str, sweep: &'a SweepFile, points: &'a [Point]) -> Self {
        let first = sweep.measure.first().map_or("", |measure| &measure.command);
        let plots = sweep.plot.iter().map(|plot| (plot.command.as_deref().unwrap_or(first), plot)).collect();
        Self { name, plots, points }
    }

    /// Checks the plots of a finished point's command.
    ///
    /// # Errors
    /// Names a plot of figures that the point does not have, and those that it has.
    pub fn see(&mut self, point: &Point, finished: &Finished) -> CliResult {
        if !is_whole(&finished.result) {
            return Ok(());
        }
        let command = point.command.as_str();
        let table = Table::new(&[(point.clone(), finished.clone())]);
        let names = table.names(command);
        let axes = self.numeric_axes(command);
        let labels = || table.rows.iter().flat_map(|row| &row.labels);
        let is_number = |x: &String| labels().any(|(label, value)| label == x && value.parse::<f64>().is_ok());
        for (_, plot) in self.plots.iter().filter(|(of, _)| *of == command) {
            let refuse = |key: &str, expected: &str, found: &str, there: Vec<String>| {
                let problem = format!("{}: plot {}: {key}: expected {expected}, found {found}", self.name, plot.name);
                Err(CliError::input(problem, format!("{command} has {}", there.join(", "))))
            };
            let figures = || table.figures(command);
            if !names.contains(&plot.y) {
                return refuse("y", "a figure", &plot.y, figures());
            }
            if let Some(x) = plot.x.as_ref().filter(|x| !names.contains(x) && !axes.contains(x) && !is_number(x)) {
                let there = axes.iter().map(|axis| (*axis).clone()).chain(figures()).collect();
                return refuse("x", "a key of the grid with numbers, or a figure", x, there);
            }
        }
        self.plots.retain(|(of, _)| *of != command);
        Ok(())
    }

    /// Keys of the grid that have numbers among their values.
    fn numeric_axes(&self, command: &str) -> BTreeSet<&'a String> {
        let axes = self.points.iter().filter(|point| point.command == command).flat_map(|point| &point.axes);
        axes.filter(|(_, value)| value.is_integer() || value.is_float()).map(|(key, _)| key).collect()
    }
}

/// Whether a result shows all figures of its command: one with an empty list says of what it did not measure nothing.
fn is_whole(result: &Value) -> bool {
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    !is_empty(result) && !result.as_object().is_some_and(|fields| fields.values().any(is_empty))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::table::tests::finished;
    use serde_json::json;

    fn sweep(plot: &str) -> SweepFile {
        let text = format!("title = \"t\"\nmeasure = [{{ command = \"eval a\" }}]\n[[plot]]\n{plot}\n");
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn figures_are_checked_at_the_first_result_that_has_any() {
        let (point, empty) = finished("eval a", "selector.fetch_ratio", 0.5, json!({"rows": []}));
        let result =
            json!({"rows": [{"policy": "x", "share": 0.5, "share_low": 0.4, "share_high": 0.6, "rate": null}]});
        let (_, whole) = finished("eval a", "selector.fetch_ratio", 0.5, result);
        let points = [point.clone()];
        for (plot, message) in [
            ("y = \"share\"", None),
            ("y = \"rate\"\nx = \"share\"", None),
            ("y = \"share\"\nx = \"selector.fetch_ratio\"", None),
            ("y = \"shar\"", Some("s.toml: plot p: y: expected a figure, found shar\n  hint: eval a has share")),
            (
                "y = \"share\"\nx = \"policy\"",
                Some(
                    "s.toml: plot p: x: expected a key of the grid with numbers, or a figure, found policy\n  \
                     hint: eval a has selector.fetch_ratio, share",
                ),
            ),
        ] {
            let sweep = sweep(&format!("name = \"p\"\n{plot}"));
            let mut unseen = Unseen::new("s.toml", &sweep, &points);
            unseen.see(&point, &empty).unwrap();
            assert_eq!(unseen.plots.len(), 1);
            match (unseen.see(&point, &whole), message) {
                (Ok(()), None) => assert!(unseen.plots.is_empty()),
                (Err(error), Some(message)) => assert_eq!(error.text(), Some(message)),
                other => panic!("{plot}: {other:?}"),
            }
        }
    }
}
