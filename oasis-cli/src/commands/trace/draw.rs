//! `oasis trace draw`: one decode step as a picture.

use crate::error::CliResult;
use crate::output::refused;
use crate::trace::{DecodeStep, Recording, draw};
use clap::Args;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `trace draw`.
#[derive(Debug, Args)]
pub struct DrawArgs {
    /// Trace that `oasis run --trace` wrote
    trace: PathBuf,
    /// Step to draw [default: a middle one]
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// Add a text to the heading, such as the model's name
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
    /// File to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Draws.
///
/// # Errors
/// When the file is no trace of ours, does not have the step, or the picture cannot be written.
pub fn run(args: &DrawArgs, out: &mut dyn Write) -> CliResult {
    let step = DecodeStep::choose(&Recording::read(&args.trace)?, args.step)?;
    let subject = args.title.as_ref().map_or_else(String::new, |title| format!(", {title}"));
    let picture = draw(&step, &subject);
    match &args.output {
        None => Ok(out.write_all(picture.as_bytes())?),
        Some(path) => std::fs::write(path, picture).map_err(|error| refused("--output", path, &error)),
    }
}
