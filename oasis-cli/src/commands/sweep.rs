//! `oasis sweep`: a measurement at every point of a grid.

use crate::args::GlobalArgs;
use crate::error::{CliError, CliResult};
use crate::sweep::{self, Finished, Point, State, SweepFile, Table};
use clap::Args;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Arguments of `sweep`.
#[derive(Debug, Args)]
pub struct SweepArgs {
    /// Sweeps, each a TOML file
    #[arg(required = true)]
    file: Vec<PathBuf>,
    /// Folder of the results; each sweep has a folder in it, named after its file
    #[arg(short, long, value_name = "FOLDER", default_value = "sweeps")]
    output: PathBuf,
    /// Another value of an argument of the measurements that name it, such as windows=1 for a trial; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    argument: Vec<String>,
    /// Print the points and which of them are finished, and measure nothing
    #[arg(long)]
    dry_run: bool,
}

/// Measures every point that is not finished yet, and writes results and report.
///
/// # Errors
/// Before anything is measured when a file, a command or a setting is wrong; after all other points when one failed; at
/// once on Ctrl-C.
pub fn run(args: &SweepArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    crate::interrupt::catch();
    let mut sweeps = args.file.iter().map(|file| SweepFile::read(file)).collect::<CliResult<Vec<_>>>()?;
    for argument in &args.argument {
        replace(argument, &mut sweeps)?;
    }
    let mut failed = Vec::new();
    for (file, (sweep, source)) in args.file.iter().zip(&sweeps) {
        failed.extend(one(args, file, sweep, source, global, out)?);
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(CliError::failure(
        format!("{} points failed:\n  {}", failed.len(), failed.join("\n  ")),
        "the same command measures what is missing",
    ))
}

fn replace(argument: &str, sweeps: &mut [(SweepFile, String)]) -> CliResult {
    let (name, value) = argument.split_once('=').ok_or_else(|| {
        CliError::input(format!("--argument: expected NAME=VALUE, found {argument}"), "--argument windows=1")
    })?;
    let name = format!("--{name}");
    let replaced: usize = sweeps.iter_mut().map(|(sweep, _)| sweep.replace_argument(&name, value)).sum();
    if replaced == 0 {
        return Err(CliError::input(
            format!("--argument {argument}: expected an argument of a measurement, found none that names {name}"),
            "it replaces what stands in the arguments of a [[measure]]",
        ));
    }
    Ok(())
}

/// Returns what failed.
fn one(
    args: &SweepArgs,
    file: &Path,
    sweep: &SweepFile,
    source: &str,
    global: &GlobalArgs,
    out: &mut dyn Write,
) -> CliResult<Vec<String>> {
    let points = sweep.points()?;
    // All of them before the first one runs: an hour is a long time to wait for a misspelt key.
    let ready = points.iter().map(|point| point.prepare(global)).collect::<CliResult<Vec<_>>>()?;
    let name = file.file_stem().unwrap_or_default();
    let state = State::open(&args.output.join(name))?;
    let mut finished: BTreeMap<String, Finished> =
        ready.iter().filter_map(|ready| Some((ready.id.clone(), state.read(&ready.id)?))).collect();
    let done = ready.iter().filter(|ready| finished.contains_key(&ready.id)).count();
    writeln!(out, "{}: {} points, {done} of them finished before", sweep.title, points.len())?;
    out.flush()?;

    let mut failed = Vec::new();
    for (index, (point, ready)) in points.iter().zip(&ready).enumerate() {
        let place = format!("{:>4}/{}", index + 1, points.len());
        let what = format!("{}  {}", point.command, point.label());
        if args.dry_run {
            let state = if finished.contains_key(&ready.id) { "finished" } else { "to do" };
            writeln!(out, "{place}  {state:<8}  {what}")?;
            continue;
        }
        if finished.contains_key(&ready.id) {
            continue;
        }
        match ready.run(point) {
            Ok(result) => {
                state.keep(&ready.id, &result)?;
                writeln!(out, "{place}  {:>7.1} s  {what}", result.provenance.seconds)?;
                finished.insert(ready.id.clone(), result);
            }
            Err(CliError::Interrupted) => return Err(CliError::Interrupted),
            Err(error) => {
                let text = error.text().unwrap_or_default().replace('\n', " ");
                writeln!(out, "{place}  failed     {what}: {text}")?;
                failed.push(format!("{what}: {text}"));
            }
        }
        out.flush()?;
    }
    if !args.dry_run {
        let results = points.into_iter().zip(&ready);
        let results = results.filter_map(|(point, ready)| Some((point, finished.get(&ready.id)?.clone())));
        write_results(&state, sweep, source, ready.len(), &results.collect::<Vec<_>>(), out)?;
    }
    Ok(failed)
}

fn write_results(
    state: &State,
    sweep: &SweepFile,
    source: &str,
    planned: usize,
    results: &[(Point, Finished)],
    out: &mut dyn Write,
) -> CliResult {
    let table = Table::new(results);
    state.write("results.csv", &table.csv())?;
    let points: Vec<_> = results
        .iter()
        .map(|(point, finished)| {
            json!({"case": point.case, "axes": BTreeMap::from_iter(point.axes.iter().cloned()), "measured": finished})
        })
        .collect();
    let all = json!({"title": sweep.title, "about": sweep.about, "sweep": source, "points": points});
    state.write("results.json", &(serde_json::to_string_pretty(&all)? + "\n"))?;
    let pictures = sweep::pictures(sweep, &table);
    for (name, svg) in &pictures {
        state.write(&format!("{name}.svg"), svg)?;
    }
    state.write("report.html", &sweep::render(sweep, source, planned, results))?;
    writeln!(
        out,
        "{} of {planned} points in {}, beside it results.csv, results.json and {} pictures",
        results.len(),
        state.path("report.html").display(),
        pictures.len()
    )?;
    Ok(())
}
