//! `oasis completions`: scripts that complete commands and options in a shell.

use crate::cli::Cli;
use crate::error::CliResult;
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::io::Write;

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell to complete in
    shell: Shell,
}

/// Prints the script.
///
/// # Errors
/// The writer's.
pub fn run(args: &CompletionsArgs, out: &mut dyn Write) -> CliResult {
    // Generated into memory: the generator panics where its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "oasis", &mut script);
    Ok(out.write_all(&script)?)
}
