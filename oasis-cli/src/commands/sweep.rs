//! `oasis sweep`: a measurement at every point of a grid.

use crate::args::GlobalArgs;
use crate::error::{CliError, CliResult};
use crate::sweep::{Checks, Digests, Failures, Job, SweepFile};
use clap::Args;
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
    /// Measure every point anew, those too that are finished
    #[arg(long)]
    fresh: bool,
    /// Print the points and which of them are finished, and measure nothing
    #[arg(long)]
    dry_run: bool,
}

/// Measures every point that is not finished yet, and writes results and report.
///
/// # Errors
/// Before anything is measured when a file, a command or a setting is wrong, or something that a point needs is missing;
/// after the first point of a command whose figures a plot misses; after all other points when one failed; at once on
/// Ctrl-C.
pub fn run(args: &SweepArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    crate::interrupt::catch();
    check_stems(&args.file, &args.output)?;
    let mut sweeps = args.file.iter().map(|file| SweepFile::read(file)).collect::<CliResult<Vec<_>>>()?;
    for argument in &args.argument {
        replace(argument, &mut sweeps)?;
    }
    let digests = &mut Digests::default();
    let ready = |(file, sweep): (&PathBuf, _)| Job::new(file, sweep, &args.output, args.fresh, global, digests);
    let mut jobs = args.file.iter().zip(sweeps).map(ready).collect::<CliResult<Vec<_>>>()?;
    for (file, job) in args.file.iter().zip(&jobs) {
        for set in job.overridden(global) {
            eprintln!("warning: --set {set}: {} sets this key itself, and its value counts", file.display());
        }
    }
    if !args.dry_run {
        let checks = &mut Checks::default();
        jobs.iter().try_for_each(|job| job.check(checks))?;
    }
    let mut failures = Failures::default();
    for job in &mut jobs {
        job.announce(out)?;
        if args.dry_run {
            job.list(out)?;
        } else {
            job.run(&mut failures, out)?;
        }
    }
    failures.result()
}

/// Refuses files whose results would be in one folder.
fn check_stems(files: &[PathBuf], output: &Path) -> CliResult {
    let mut known = BTreeMap::new();
    for file in files {
        let stem = file.file_stem().unwrap_or_default();
        if let Some(other) = known.insert(stem, file) {
            let folder = output.join(stem);
            return Err(CliError::input(
                format!(
                    "expected files of different names, as {} holds one sweep's results, found {} and {}",
                    folder.display(),
                    other.display(),
                    file.display()
                ),
                "rename one, or run them one by one with an --output each",
            ));
        }
    }
    Ok(())
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
