//! The file of a sweep and the points that it stands for.

use crate::error::{CliError, CliResult};
use crate::sweep::point::{Point, plain};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::Path;
use toml::{Table, Value};

/// A sweep, as its file describes it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepFile {
    /// Heading of the report.
    pub title: String,
    /// What the sweep is to show.
    #[serde(default)]
    pub about: String,
    /// What is measured at every point.
    pub measure: Vec<Measure>,
    /// Settings of every point, laid out as in `oasis.toml`.
    #[serde(default)]
    settings: Table,
    /// Lists of values by key; the points are all their combinations. A key that begins with `--` is an argument.
    #[serde(default)]
    grid: Table,
    /// Named settings; each is combined with the whole grid.
    #[serde(default)]
    case: Vec<Case>,
    /// Pictures [default: one for each figure of each measurement].
    #[serde(default)]
    pub plot: Vec<Plot>,
}

/// One measurement.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measure {
    /// A command of `oasis eval` or `oasis bench`, or `trace replay`.
    pub command: String,
    /// Its arguments.
    #[serde(default)]
    pub arguments: Vec<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    #[serde(default)]
    settings: Table,
    /// In place of the sweep's grid.
    grid: Option<Table>,
}

/// One picture.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plot {
    /// File name without its ending.
    pub name: String,
    /// Heading.
    pub title: Option<String>,
    /// The measurement whose figures are drawn [default: the first].
    pub command: Option<String>,
    /// Key of the grid, or figure, along the horizontal axis; without it there is a bar for each point.
    pub x: Option<String>,
    /// Figure along the vertical axis.
    pub y: String,
}

impl SweepFile {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read, is no TOML, or describes no sweep; when the name or command of a plot is wrong.
    pub fn read(path: &Path) -> CliResult<(Self, String)> {
        let name = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| {
            CliError::input(
                format!("{name}: expected a readable file of a sweep, found: {error}"),
                "docs/experiments has sweeps to start from",
            )
        })?;
        let file: Self = toml::from_str(&text).map_err(|error| {
            CliError::input(
                format!("{name}: expected a sweep, found: {}", error.to_string().trim_end()),
                "a sweep has title, [[measure]] with command and arguments, and [settings], [grid], [[case]], [[plot]]",
            )
        })?;
        if file.measure.is_empty() {
            return Err(CliError::input(
                format!("{name}: measure: expected at least one measurement, found none"),
                "[[measure]] command = \"eval recall\"",
            ));
        }
        file.check_plots(&name.to_string())?;
        Ok((file, text))
    }

    /// Checks what is known of plots before any result: that every name is a file's of its own, and that something measures
    /// each command. `name` is that of the sweep's file.
    fn check_plots(&self, name: &str) -> CliResult {
        let mut names = BTreeSet::new();
        for plot in &self.plot {
            let refuse = |problem: String, hint: &str| Err(CliError::input(format!("{name}: plot: {problem}"), hint));
            let found = &plot.name;
            if found.is_empty() || found.starts_with('.') || found.contains(['/', '\\', '\0']) {
                let hint = "the picture is NAME.svg in the sweep's folder";
                return refuse(format!("name: expected a file name without a folder, found {found:?}"), hint);
            }
            if !names.insert(found) {
                let hint = "pictures of one name would be one file";
                return refuse(format!("name: expected each name once, found {found:?} twice"), hint);
            }
            let commands: Vec<&str> = self.measure.iter().map(|measure| measure.command.as_str()).collect();
            if let Some(command) = plot.command.as_ref().filter(|command| !commands.contains(&command.as_str())) {
                let hint = format!("it measures {}", commands.join(", "));
                return refuse(format!("{found}: command: expected one of the sweep's, found {command}"), &hint);
            }
        }
        Ok(())
    }

    /// Gives `name`, such as `--windows`, another value in every measurement whose arguments name it. Returns how often.
    pub fn replace_argument(&mut self, name: &str, value: &str) -> usize {
        let mut replaced = 0;
        for measure in &mut self.measure {
            let mut is_value = false;
            for argument in &mut measure.arguments {
                if is_value {
                    value.clone_into(argument);
                    replaced += 1;
                }
                is_value = !is_value && argument == name;
            }
        }
        replaced
    }

    /// All points, in order: by measurement, case, and the grid's keys, the last key fastest.
    ///
    /// # Errors
    /// When a key of the grid has no list of values.
    pub fn points(&self) -> CliResult<Vec<Point>> {
        let fixed = flatten(&self.settings);
        let unnamed = [Case { name: String::new(), settings: Table::new(), grid: None }];
        let cases = if self.case.is_empty() { &unnamed[..] } else { &self.case };
        let mut points = Vec::new();
        for measure in &self.measure {
            for case in cases {
                for axes in combinations(&axes(case.grid.as_ref().unwrap_or(&self.grid))?) {
                    let mut settings = fixed.clone();
                    settings.extend(flatten(&case.settings));
                    let mut arguments = measure.arguments.clone();
                    for (key, value) in &axes {
                        if key.starts_with("--") {
                            arguments.extend([key.clone(), plain(value)]);
                        } else {
                            settings.push((key.clone(), value.clone()));
                        }
                    }
                    let case = Some(case.name.clone()).filter(|name| !name.is_empty());
                    points.push(Point { command: measure.command.clone(), arguments, settings, case, axes });
                }
            }
        }
        Ok(points)
    }
}

/// Dotted keys and values of nested tables. A `kind` stands before its section's other keys, which belong to it.
fn flatten(table: &Table) -> Vec<(String, Value)> {
    let mut pairs = Vec::new();
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| (*key != "kind", (*key).clone()));
    for (key, value) in entries {
        match value {
            Value::Table(inner) => {
                pairs.extend(flatten(inner).into_iter().map(|(rest, value)| (format!("{key}.{rest}"), value)));
            }
            value => pairs.push((key.clone(), value.clone())),
        }
    }
    pairs
}

/// Keys of a grid with their values.
fn axes(grid: &Table) -> CliResult<Vec<(String, Vec<Value>)>> {
    let axes = flatten(grid).into_iter().map(|(key, values)| match values {
        Value::Array(values) if !values.is_empty() => Ok((key, values)),
        other => Err(CliError::input(
            format!("grid.{key}: expected a list of values, found {other}"),
            "a value of every point belongs into [settings]",
        )),
    });
    axes.collect()
}

/// Every choice of one value a key.
fn combinations(axes: &[(String, Vec<Value>)]) -> Vec<Vec<(String, Value)>> {
    axes.iter().fold(vec![Vec::new()], |so_far, (key, values)| {
        let longer = |chosen: &Vec<(String, Value)>| {
            let chosen = chosen.clone();
            values.iter().map(move |value| [chosen.clone(), vec![(key.clone(), value.clone())]].concat())
        };
        so_far.iter().flat_map(longer).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(text: &str) -> SweepFile {
        toml::from_str(text).unwrap()
    }

    fn plots(plots: &str) -> SweepFile {
        sweep(&format!("title = \"t\"\nmeasure = [{{ command = \"eval a\" }}]\n[[plot]]\n{plots}\n"))
    }

    #[test]
    fn names_and_commands_of_plots_are_checked_without_results() {
        for (plot, message) in [
            ("name = \"../p\"\ny = \"y\"", "s.toml: plot: name: expected a file name without a folder, found \"../p\""),
            ("name = \"a\\\\b\"\ny = \"y\"", "s.toml: plot: name: expected a file name without"),
            ("name = \"\"\ny = \"y\"", "s.toml: plot: name: expected a file name without"),
            ("name = \"..\"\ny = \"y\"", "s.toml: plot: name: expected a file name without"),
            (
                "name = \"p\"\ny = \"y\"\n[[plot]]\nname = \"p\"\ny = \"z\"",
                "s.toml: plot: name: expected each name once, found \"p\" twice",
            ),
            (
                "name = \"p\"\ny = \"y\"\ncommand = \"eval b\"",
                "s.toml: plot: p: command: expected one of the sweep's, found eval b\n  hint: it measures eval a",
            ),
        ] {
            let error = plots(plot).check_plots("s.toml").unwrap_err();
            assert!(error.text().unwrap().starts_with(message), "{error:?}");
        }
        assert!(plots("name = \"p\"\ny = \"y\"\ncommand = \"eval a\"").check_plots("s.toml").is_ok());
    }

    #[test]
    fn points_are_all_combinations() {
        let sweep = sweep(
            "title = \"t\"\n[[measure]]\ncommand = \"eval recall\"\narguments = [\"--per\", \"1\"]\n\
             [settings]\nkv.budget_blocks = 8\n\
             [grid]\n\"--length\" = [4096, 8192]\nselector.fetch_ratio = [0.1, 0.5, 1.0]\n\
             [[case]]\nname = \"a\"\nsettings = { predictor = { boost = 1, kind = \"exact\" } }\n[[case]]\nname = \"b\"\n",
        );
        let points = sweep.points().unwrap();
        assert_eq!(points.len(), 2 * 2 * 3);
        let first = &points[1];
        assert_eq!(first.arguments, ["--per", "1", "--length", "4096"]);
        let settings: Vec<String> = first.settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let expected =
            ["kv.budget_blocks=8", "predictor.kind=\"exact\"", "predictor.boost=1", "selector.fetch_ratio=0.5"];
        assert_eq!(settings, expected);
        assert_eq!((first.case.as_deref(), points[6].case.as_deref()), (Some("a"), Some("b")));
    }

    #[test]
    fn an_argument_is_replaced_where_it_stands() {
        let mut sweep = sweep(
            "title = \"t\"\n[[measure]]\ncommand = \"eval coverage\"\narguments = [\"--windows\", \"20\", \"--steps\", \"8\"]\n\
             [[measure]]\ncommand = \"eval recall\"\narguments = [\"--per\", \"2\"]\n",
        );
        assert_eq!((sweep.replace_argument("--windows", "1"), sweep.replace_argument("--per", "1")), (1, 1));
        assert_eq!(sweep.measure[0].arguments, ["--windows", "1", "--steps", "8"]);
        assert_eq!(sweep.measure[1].arguments, ["--per", "1"]);
        assert_eq!(sweep.replace_argument("--length", "4096"), 0);
    }

    #[test]
    fn a_case_may_have_a_grid_of_its_own() {
        let sweep = sweep(
            "title = \"t\"\n[[measure]]\ncommand = \"bench cpu\"\n[grid]\nselector.fetch_ratio = [0.1, 0.5, 1.0]\n\
             [[case]]\nname = \"a\"\n[[case]]\nname = \"b\"\ngrid = { selector.fetch_ratio = [0.1] }\n\
             [[case]]\nname = \"c\"\ngrid = {}\n",
        );
        let points = sweep.points().unwrap();
        let of = |name: &str| points.iter().filter(|point| point.case.as_deref() == Some(name)).count();
        assert_eq!((of("a"), of("b"), of("c")), (3, 1, 1));
    }

    #[test]
    fn without_grid_and_cases_there_is_one_point_a_measurement() {
        let points = sweep("title = \"t\"\n[[measure]]\ncommand = \"bench cpu\"\n").points().unwrap();
        assert_eq!((points.len(), points[0].command.as_str()), (1, "bench cpu"));
    }

    #[test]
    fn a_single_value_is_no_axis() {
        let sweep = sweep("title = \"t\"\nmeasure = [{ command = \"bench cpu\" }]\n[grid]\nkv.budget_blocks = 4\n");
        let error = sweep.points().unwrap_err();
        assert!(error.text().unwrap().starts_with("grid.kv.budget_blocks: expected a list of values, found 4"));
    }
}
