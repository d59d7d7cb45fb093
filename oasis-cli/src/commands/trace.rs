//! `oasis trace`: what `oasis run --trace` recorded.

use crate::error::{CliError, CliResult};
use crate::trace::{DecodeStep, Recording, draw};
use clap::{Args, Subcommand};
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `trace`.
#[derive(Debug, Args)]
pub struct TraceArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Draw one decode step as SVG: the foreground and the stages beside it
    Draw(DrawArgs),
}

#[derive(Debug, Args)]
struct DrawArgs {
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
pub fn run(args: &TraceArgs, out: &mut dyn Write) -> CliResult {
    let Action::Draw(args) = &args.action;
    let step = DecodeStep::choose(&Recording::read(&args.trace)?, args.step)?;
    let subject = args.title.as_ref().map_or_else(String::new, |title| format!(", {title}"));
    let picture = draw(&step, &subject);
    match &args.output {
        None => Ok(out.write_all(picture.as_bytes())?),
        Some(path) => std::fs::write(path, picture).map_err(|error| {
            CliError::Input(format!("--output {}: expected a file that can be written, found: {error}", path.display()))
        }),
    }
}
