//! Results as one table: a row for each row that a measurement printed, its texts as labels and its numbers as figures.

use crate::sweep::point::{Finished, Point, plain};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// All rows of a sweep.
pub struct Table {
    /// Rows in the order of the points.
    pub rows: Vec<Row>,
}

/// One row.
pub struct Row {
    /// Command that measured it.
    pub command: String,
    /// What tells it from others: case, place in the grid, texts of the result.
    pub labels: BTreeMap<String, String>,
    /// Numbers of the result, nested ones under dotted names.
    pub figures: BTreeMap<String, f64>,
    /// Names whose values are not known here, though they may be in other rows.
    pub unknown: BTreeSet<String>,
    /// Circumstances.
    pub circumstances: Vec<(&'static str, String)>,
}

impl Table {
    /// The table of finished points.
    pub fn new(finished: &[(Point, Finished)]) -> Self {
        Self { rows: finished.iter().flat_map(|(point, finished)| rows(point, finished)).collect() }
    }

    /// Labels that differ between rows of the same command, in order.
    pub fn varying(&self, command: &str) -> Vec<String> {
        let rows = || self.rows.iter().filter(|row| row.command == command);
        let keys: BTreeSet<&String> = rows().flat_map(|row| row.labels.keys()).collect();
        let varies = |key: &String| rows().map(|row| row.labels.get(key)).collect::<BTreeSet<_>>().len() > 1;
        keys.into_iter().filter(|key| varies(key)).cloned().collect()
    }

    /// Commands in order of their first rows.
    pub fn commands(&self) -> Vec<String> {
        let mut commands: Vec<String> = Vec::new();
        for row in &self.rows {
            if !commands.contains(&row.command) {
                commands.push(row.command.clone());
            }
        }
        commands
    }

    /// Names of all figures of a command, known somewhere or not.
    pub fn names(&self, command: &str) -> BTreeSet<&String> {
        let rows = self.rows.iter().filter(|row| row.command == command);
        rows.flat_map(|row| row.figures.keys().chain(&row.unknown)).collect()
    }

    /// Figures of a command, without the nested ones and the bounds of others.
    pub fn figures(&self, command: &str) -> Vec<String> {
        let rows = self.rows.iter().filter(|row| row.command == command);
        let names: BTreeSet<&String> = rows.flat_map(|row| row.figures.keys()).collect();
        let is_bound = |name: &String| {
            name.strip_suffix("_low").or(name.strip_suffix("_high")).is_some_and(|of| names.contains(&of.to_owned()))
        };
        names.iter().filter(|name| !name.contains('.') && !is_bound(name)).map(|name| (*name).clone()).collect()
    }

    /// As CSV (RFC 4180), a column for each label, figure and circumstance.
    pub fn csv(&self) -> String {
        let labels: BTreeSet<&String> = self.rows.iter().flat_map(|row| row.labels.keys()).collect();
        let figures: BTreeSet<&String> = self.rows.iter().flat_map(|row| row.figures.keys()).collect();
        let circumstances: Vec<&str> =
            self.rows.first().map_or_else(Vec::new, |row| row.circumstances.iter().map(|(name, _)| *name).collect());
        let names = labels.iter().chain(&figures).map(|name| name.as_str());
        let header: Vec<&str> = std::iter::once("command").chain(names).chain(circumstances).collect();
        let mut text = line(header.into_iter());
        for row in &self.rows {
            let numbers: Vec<String> =
                figures.iter().map(|name| row.figures.get(*name).map_or_else(String::new, f64::to_string)).collect();
            let texts = labels.iter().map(|name| row.labels.get(*name).map_or("", String::as_str));
            let circumstances = row.circumstances.iter().map(|(_, value)| value.as_str());
            let cells = std::iter::once(row.command.as_str()).chain(texts);
            text.push_str(&line(cells.chain(numbers.iter().map(String::as_str)).chain(circumstances)));
        }
        text
    }
}

fn line<'a>(cells: impl Iterator<Item = &'a str>) -> String {
    let quoted = |cell: &str| {
        if cell.contains([',', '"', '\n']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.to_owned() }
    };
    let mut line = cells.map(quoted).collect::<Vec<_>>().join(",");
    line.push('\n');
    line
}

/// The elements of a list of objects, which are rows.
fn elements(value: &Value) -> Option<&[Value]> {
    value.as_array().filter(|list| !list.is_empty() && list.iter().all(Value::is_object)).map(Vec::as_slice)
}

/// A result that is a list, or has a single one among its fields, has a row for each element; what stands beside the list
/// belongs to all of them.
fn rows(point: &Point, finished: &Finished) -> Vec<Row> {
    let fields = finished.result.as_object();
    let lists: Vec<_> =
        fields.into_iter().flatten().filter_map(|(key, value)| Some((key.as_str(), elements(value)?))).collect();
    let (list, results) = match (elements(&finished.result), lists.as_slice()) {
        (Some(elements), _) => (None, elements),
        (None, &[(key, elements)]) => (Some(key), elements),
        _ => (None, std::slice::from_ref(&finished.result)),
    };
    let provenance = &finished.provenance;
    let circumstances = [
        ("seconds", format!("{:.3}", provenance.seconds)),
        ("finished", provenance.finished.clone()),
        ("version", provenance.program.version.clone()),
        ("commit", provenance.program.commit.clone().unwrap_or_default()),
        ("cpu", provenance.machine.cpu.clone().unwrap_or_default()),
        ("threads", provenance.machine.threads.to_string()),
        ("gpus", provenance.machine.gpus.join("; ")),
    ];
    let row = |result: &Value| {
        let mut row = Row {
            command: point.command.clone(),
            labels: point.axes.iter().map(|(key, value)| (key.clone(), plain(value))).collect(),
            figures: BTreeMap::new(),
            unknown: BTreeSet::new(),
            circumstances: circumstances.to_vec(),
        };
        row.labels.extend(point.case.iter().map(|case| ("case".to_owned(), case.clone())));
        if let (Some(list), Some(fields)) = (list, fields) {
            fields.iter().filter(|(key, _)| *key != list).for_each(|(key, value)| take(&mut row, key.clone(), value));
        }
        take(&mut row, String::new(), result);
        row
    };
    results.iter().map(row).collect()
}

fn take(row: &mut Row, name: String, value: &Value) {
    let inner = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
    match value {
        Value::Null => drop(row.unknown.insert(name)),
        Value::Bool(truth) => drop(row.labels.insert(name, truth.to_string())),
        Value::String(text) => drop(row.labels.insert(name, text.clone())),
        Value::Number(number) => drop(row.figures.insert(name, number.as_f64().unwrap_or(f64::NAN))),
        Value::Array(values) => {
            values.iter().enumerate().for_each(|(index, value)| take(row, inner(&index.to_string()), value));
        }
        Value::Object(fields) => fields.iter().for_each(|(key, value)| take(row, inner(key), value)),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::sweep::point::Provenance;
    use crate::sweep::program::Program;
    use serde_json::json;

    /// A finished point with one axis.
    pub fn finished(command: &str, key: &str, value: f64, result: Value) -> (Point, Finished) {
        let axes = vec![(key.to_owned(), toml::Value::Float(value))];
        let point = Point {
            command: command.to_owned(),
            arguments: Vec::new(),
            settings: axes.clone(),
            case: Some("a, \"b\"".to_owned()),
            axes,
        };
        let provenance = Provenance {
            program: Program { version: "0.1.0".to_owned(), commit: None, build: None },
            machine: crate::machine::examine(),
            finished: "2026-11-30T00:00:00Z".to_owned(),
            seconds: 1.5,
        };
        let finished = Finished {
            command: command.to_owned(),
            arguments: Vec::new(),
            config: BTreeMap::new(),
            inputs: BTreeMap::new(),
            result,
            provenance,
        };
        (point, finished)
    }

    #[test]
    fn lists_become_rows_and_nested_numbers_dotted_figures() {
        let result = json!([{"policy": "x", "share": 0.5, "share_low": 0.4, "share_high": 0.6, "layers": [1, 2]},
            {"policy": "y", "share": 0.25}]);
        let table = Table::new(&[finished("eval a", "k", 0.5, result)]);
        assert_eq!(table.rows.len(), 2);
        assert_eq!(table.rows[0].figures["layers.1"], 2.0);
        assert_eq!(table.varying("eval a"), ["policy"]);
        assert_eq!(table.figures("eval a"), ["share"]);
        let within =
            json!({"k": 8, "mean": [0.5, 0.25], "layers": [{"layer": 0, "query": "x"}, {"layer": 1, "query": "x"}]});
        let rows = Table::new(&[finished("eval b", "k", 0.5, within)]).rows;
        let figures = |row: &Row| row.figures.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>();
        assert_eq!(
            rows.iter().map(figures).collect::<Vec<_>>(),
            [0, 1].map(|layer| {
                ["k=8".to_owned(), format!("layer={layer}"), "mean.0=0.5".to_owned(), "mean.1=0.25".to_owned()].to_vec()
            })
        );
        let csv = table.csv();
        let mut lines = csv.lines();
        let header =
            "command,case,k,policy,layers.0,layers.1,share,share_high,share_low,seconds,finished,version,commit";
        assert!(lines.next().unwrap().starts_with(header), "{csv}");
        assert!(lines.next().unwrap().starts_with("eval a,\"a, \"\"b\"\"\",0.5,x,1,2,0.5,0.6,0.4,1.500,2026"), "{csv}");
        assert!(lines.next().unwrap().starts_with("eval a,\"a, \"\"b\"\"\",0.5,y,,,0.25,,,1.500,2026"), "{csv}");
    }
}
