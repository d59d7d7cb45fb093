//! One point of a sweep: what runs, what came of it, and under which circumstances.

use crate::args::GlobalArgs;
use crate::cli::{Cli, Command};
use crate::error::{CliError, CliResult};
use crate::machine::{self, Machine};
use crate::settings::resolve;
use clap::Parser;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
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
    /// What the command printed.
    pub result: serde_json::Value,
    /// Circumstances.
    pub provenance: Provenance,
}

/// Circumstances of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of the program.
    pub version: String,
    /// Commit it was built from, with `+` where files differed from it; absent where that was not known.
    pub commit: Option<String>,
    /// Machine.
    pub machine: Machine,
    /// End of the measurement, UTC.
    pub finished: String,
    /// Seconds it took.
    pub seconds: f64,
}

impl Point {
    /// Reads the arguments and the configuration.
    ///
    /// # Errors
    /// When the command is no eval, bench or replay, or an argument or a value is wrong.
    pub fn prepare(&self, global: &GlobalArgs) -> CliResult<Ready> {
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
            let problem = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            CliError::input(
                format!("measure {}: expected arguments of the command, found: {problem}", self.command),
                format!("oasis {} --help", self.command),
            )
        })?;
        let measures = match &cli.command {
            Command::Eval(_) | Command::Bench(_) => true,
            Command::Trace(args) => args.is_replay(),
            _ => false,
        };
        if !measures {
            return Err(CliError::input(
                format!(
                    "measure: expected a command of `oasis eval` or `oasis bench`, or `trace replay`, found {}",
                    self.command
                ),
                "command = \"eval recall\"",
            ));
        }
        let resolved = resolve(&cli.global, Vec::new())?;
        let config: BTreeMap<String, Value> = resolved.values.into_iter().map(|(key, value, _)| (key, value)).collect();
        let identity = serde_json::to_vec(&(&self.command, &self.arguments, &config))?;
        let id = Sha256::digest(identity).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Ok(Ready { cli, config, id })
    }

    /// What tells the point from its neighbours, in words.
    pub fn label(&self) -> String {
        let axes = self.axes.iter().map(|(key, value)| format!("{key}={}", plain(value)));
        self.case.iter().cloned().chain(axes).collect::<Vec<_>>().join(" ")
    }
}

impl Ready {
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
            result: serde_json::from_slice(&out)?,
            provenance: Provenance {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                commit: option_env!("OASIS_COMMIT").map(str::to_owned),
                machine: machine::examine(),
                finished: utc(SystemTime::now()),
                seconds: start.elapsed().as_secs_f64(),
            },
        })
    }
}

/// A time as `2026-11-30T12:34:56Z`.
fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March have their leap day at the end (H. Hinnant, "chrono-compatible low-level date
    // algorithms").
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// A value as it is written in an argument: text without quotes.
pub fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
    fn dates_are_those_of_the_calendar() {
        // The expected values are those of `date -u -d @N`.
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_709_164_800, "2024-02-29T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn what_changes_the_run_changes_the_name_of_its_file() {
        let global = GlobalArgs::default();
        let id = |point: Point| point.prepare(&global).unwrap_or_else(|error| panic!("{:?}", error.text())).id;
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
            (point("eval recal", &[], &[]), "measure eval recal: expected arguments of the command"),
            (
                point("list", &[], &[]),
                "measure: expected a command of `oasis eval` or `oasis bench`, or `trace replay`, found list",
            ),
            (point("eval recall", &["--none"], &[]), "measure eval recall: expected arguments of the command"),
            (point("eval recall", &[], &[("kv.budget_blocks", text)]), "kv.budget_blocks: expected"),
        ] {
            let Err(error) = point.prepare(&GlobalArgs::default()) else { panic!("{point:?}") };
            assert!(error.text().unwrap().starts_with(message), "{:?}", error.text());
        }
    }
}
