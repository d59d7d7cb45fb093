//! `oasis completions`: scripts that complete commands and options in a shell.

use crate::error::CliResult;
use clap::{Args, Command};
use clap_complete::Shell;
use std::io::Write;

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell to complete in
    shell: Shell,
}

/// Prints the script for the whole `command`.
///
/// # Errors
/// The writer's.
pub fn run(args: &CompletionsArgs, mut command: Command, out: &mut dyn Write) -> CliResult {
    // Generated into memory: the generator panics where its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "oasis", &mut script);
    Ok(out.write_all(&script)?)
}
