//! One point of a sweep: what runs, what came of it, and under which circumstances.

use crate::args::GlobalArgs;
use crate::cli::{Cli, Command};
use crate::error::{CliError, CliResult};
use crate::machine::{self, Machine};
use crate::settings::resolve;
use crate::sweep::inputs::{Digests, hexadecimal};
use crate::sweep::measures::{measures, refused};
use crate::sweep::needs::Needs;
use crate::sweep::program::Program;
use crate::sweep::time::utc;
use clap::Parser;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::time::{Instant, SystemTime};
use toml::Value;

/// What runs at one point.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Command, such as `eval recall`.
    pub command: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Keys and values, later ones over earlier ones.
    pub settings: Vec<(String, Value)>,
    /// Name of the case, where the sweep has cases.
    pub case: Option<String>,
    /// Where in the grid the point lies.
    pub axes: Vec<(String, Value)>,
}

/// A point that is ready to run: its arguments and configuration are right.
pub struct Ready {
    cli: Cli,
    /// What it reads and runs.
    pub needs: Needs,
    /// Digests by path of the files that it reads.
    inputs: BTreeMap<String, String>,
    /// Every key of the configuration and its value.
    pub config: BTreeMap<String, Value>,
    /// Name of the point's file.
    pub id: String,
}

/// What a point measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Finished {
    /// Command.
    pub command: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// The whole configuration, before what the arguments set.
    pub config: BTreeMap<String, Value>,
    /// Digests by path of the files that it read.
    pub inputs: BTreeMap<String, String>,
    /// What the command printed.
    pub result: serde_json::Value,
    /// Circumstances.
    pub provenance: Provenance,
}

/// Circumstances of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Program.
    #[serde(flatten)]
    pub program: Program,
    /// Machine.
    pub machine: Machine,
    /// End of the measurement, UTC.
    pub finished: String,
    /// Seconds it took.
    pub seconds: f64,
}

impl Point {
    /// Reads the arguments and the configuration, and takes the digests of files.
    ///
    /// # Errors
    /// When the command is no eval, bench or replay, or an argument or a value is wrong.
    pub fn prepare(&self, global: &GlobalArgs, digests: &mut Digests) -> CliResult<Ready> {
        if !measures().contains(&self.command) {
            return Err(refused(&self.command));
        }
        let mut words = vec!["oasis".to_owned()];
        words.extend(self.command.split_whitespace().map(str::to_owned));
        words.push("--json".to_owned());
        words.extend(self.arguments.iter().cloned());
        if let Some(file) = &global.config {
            words.extend(["--config".to_owned(), file.display().to_string()]);
        }
        let own = self.settings.iter().map(|(key, value)| format!("{key}={value}"));
        for assignment in global.set.iter().cloned().chain(own) {
            words.extend(["--set".to_owned(), assignment]);
        }
        let cli = Cli::try_parse_from(&words).map_err(|error| {
            let text = error.to_string();
            let problem: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
            let problem = problem.join(" ");
            let problem = problem.trim_start_matches("error: ");
            CliError::input(
                format!("measure {}: expected arguments of the command, found: {problem}", self.command),
                format!("oasis {} --help", self.command),
            )
        })?;
        let needs = match &cli.command {
            Command::Eval(args) => args.needs()?,
            Command::Bench(args) => Some(args.needs()?),
            Command::Trace(args) => args.needs(),
            _ => None,
        };
        let needs = needs.ok_or_else(|| refused(&self.command))?;
        let resolved = resolve(&cli.global, Vec::new())?;
        let config: BTreeMap<String, Value> = resolved.values.into_iter().map(|(key, value, _)| (key, value)).collect();
        let inputs = needs.inputs(&resolve(&cli.global, needs.settings.clone())?.config, digests);
        let identity = serde_json::to_vec(&(&self.command, &self.arguments, &config, &inputs))?;
        let id = hexadecimal(&Sha256::digest(identity)[..8]);
        Ok(Ready { cli, needs, inputs, config, id })
    }

    /// The command, and what tells the point from its neighbours, in words.
    pub fn describe(&self) -> String {
        format!("{}  {}", self.command, self.label()).trim_end().to_owned()
    }

    /// What tells the point from its neighbours, in words.
    fn label(&self) -> String {
        let axes = self.axes.iter().map(|(key, value)| format!("{key}={}", plain(value)));
        self.case.iter().cloned().chain(axes).collect::<Vec<_>>().join(" ")
    }
}

impl Ready {
    /// Options of every command, with the point's settings.
    pub fn global(&self) -> &GlobalArgs {
        &self.cli.global
    }

    /// Measures.
    ///
    /// # Errors
    /// The command's own.
    pub fn run(&self, point: &Point) -> CliResult<Finished> {
        let start = Instant::now();
        let mut out = Vec::new();
        crate::run(&self.cli, &mut out)?;
        Ok(Finished {
            command: point.command.clone(),
            arguments: point.arguments.clone(),
            config: self.config.clone(),
            inputs: self.inputs.clone(),
            result: serde_json::from_slice(&out)?,
            provenance: Provenance {
                program: Program::this().clone(),
                machine: machine::examine(),
                finished: utc(SystemTime::now()),
                seconds: start.elapsed().as_secs_f64(),
            },
        })
    }
}

/// A value as it is written in an argument: text without quotes.
pub fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(command: &str, arguments: &[&str], settings: &[(&str, Value)]) -> Point {
        Point {
            command: command.to_owned(),
            arguments: arguments.iter().map(ToString::to_string).collect(),
            settings: settings.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect(),
            case: None,
            axes: Vec::new(),
        }
    }

    #[test]
    fn what_changes_the_run_changes_the_name_of_its_file() {
        let global = GlobalArgs::default();
        let id = |point: Point| {
            point.prepare(&global, &mut Digests::default()).unwrap_or_else(|error| panic!("{:?}", error.text())).id
        };
        let base = id(point("eval recall", &[], &[]));
        assert_eq!(base, id(point("eval recall", &[], &[("kv.budget_blocks", Value::Integer(128))])));
        assert_ne!(base, id(point("eval recall", &[], &[("kv.budget_blocks", Value::Integer(64))])));
        assert_ne!(base, id(point("eval recall", &["--per", "1"], &[])));
        assert_ne!(base, id(point("eval coverage", &[], &[])));
    }

    #[test]
    fn wrong_points_are_refused_before_anything_runs() {
        let text = Value::String("x".to_owned());
        for (point, message) in [
            (
                point("eval recal", &[], &[]),
                "measure: expected a command of `oasis eval` or `oasis bench`, or `trace replay`, found eval recal\n  hint: one of eval recall, ",
            ),
            (
                point("eval", &[], &[]),
                "measure: expected a command of `oasis eval` or `oasis bench`, or `trace replay`, found eval\n",
            ),
            (
                point("list", &[], &[]),
                "measure: expected a command of `oasis eval` or `oasis bench`, or `trace replay`, found list\n",
            ),
            (
                point("trace replay", &[], &[]),
                "measure trace replay: expected arguments of the command, found: the following required arguments were not provided: <RECORDING>\n",
            ),
            (point("eval recall", &["--none"], &[]), "measure eval recall: expected arguments of the command"),
            (point("eval recall", &[], &[("kv.budget_blocks", text)]), "kv.budget_blocks: expected"),
        ] {
            let Err(error) = point.prepare(&GlobalArgs::default(), &mut Digests::default()) else {
                panic!("{point:?}")
            };
            assert!(error.text().unwrap().starts_with(message), "{:?}", error.text());
        }
    }
}
