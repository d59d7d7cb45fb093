//! The `oasis` command as a library.
//!
//! A program of five lines has every command of `oasis` with plugins of its own:
//!
//! ```no_run
//! // use my_policies as _; // links the crate, which registers its kinds
//!
//! fn main() -> std::process::ExitCode {
//!     oasis_cli::main()
//! }
//! ```

// A crate that nothing names is not linked, and its kinds are not registered.
use oasis_policies as _;
use oasis_transport as _;

mod args;
mod assemble;
mod bench;
mod cli;
mod commands;
mod env;
mod error;
mod eval;
mod fabric;
mod generate;
mod hub;
mod interrupt;
mod machine;
mod nodes;
mod output;
mod progress;
mod prompt;
mod replay;
pub mod report;
mod settings;
mod svg;
mod sweep;
mod text;
mod tokens;
mod trace;
mod ttft;

use clap::{CommandFactory, FromArgMatches};
use cli::{Cli, Command};
use error::CliResult;
use std::io::{BufWriter, IsTerminal, Write};
use std::process::ExitCode;

/// The command line's definition, for documentation and its tests.
pub fn command() -> clap::Command {
    takes_negative_numbers(Cli::command())
}

/// Lets `-1` be the value of an option, whose own error is clearer than that of an unknown option `-1`.
fn takes_negative_numbers(command: clap::Command) -> clap::Command {
    let takes_them = |argument: clap::Arg| {
        let is_option = !argument.is_positional() && argument.get_action().takes_values();
        argument.allow_negative_numbers(is_option)
    };
    command.mut_args(takes_them).mut_subcommands(takes_negative_numbers)
}

fn parse() -> Result<Cli, clap::Error> {
    let mut command = command();
    let mut matches = command.try_get_matches_from_mut(std::env::args_os())?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Runs `oasis` on the arguments of the process.
///
/// The exit code is 0 when all is well, 1 when the work failed, 2 when the input was wrong (arguments, configuration,
/// files) and 130 after Ctrl-C.
pub fn main() -> ExitCode {
    // Only now is there but one thread.
    oasis_ucx::prepare_environment();
    let cli = match parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are "errors" that go to standard output with code 0.
            let printed = error.print();
            return match u8::try_from(error.exit_code()) {
                Ok(code) if printed.is_ok() => ExitCode::from(code),
                _ => ExitCode::SUCCESS,
            };
        }
    };
    start_logging(cli.global.verbose);
    let mut out = BufWriter::new(std::io::stdout().lock());
    let result = run(&cli, &mut out).and_then(|()| Ok(out.flush()?));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = error.exit_code();
            if let Some(text) = error.text() {
                // What was printed before the error belongs above it; a reader that is gone is no news here.
                let _ = out.flush();
                eprintln!("error: {text}");
            }
            // Dropping the writer would try once more to print what a closed pipe refused.
            let _ = out.into_parts();
            code
        }
    }
}

fn run(cli: &Cli, out: &mut dyn Write) -> CliResult {
    oasis_core::registry::check_catalogue()?;
    match &cli.command {
        Command::Run(args) => commands::run::run(args, &cli.global, out),
        Command::ServeNode(args) => commands::serve_node::run(args, &cli.global, out),
        Command::Eval(args) => commands::eval::run(args, &cli.global, out),
        Command::Bench(args) => commands::bench::run(args, &cli.global, out),
        Command::Sweep(args) => commands::sweep::run(args, &cli.global, out),
        Command::Model(args) => commands::model::run(args, out),
        Command::Trace(args) => commands::trace::run(args, &cli.global, out),
        Command::NewPolicy(args) => commands::new_policy::run(args, out),
        Command::List(args) => commands::list::run(args, out),
        Command::Explain(args) => commands::explain::run(args, &cli.global, out),
        Command::Check(args) => commands::check::run(args, &cli.global, out),
        Command::Doctor(args) => commands::doctor::run(args, &cli.global, out),
        Command::Pull(args) => commands::pull::run(args, out),
        Command::Completions(args) => commands::completions::run(args, Cli::command(), out),
    }
}

/// Logs to standard error; `OASIS_LOG` holds the filter, `-v` raises its default from warnings.
fn start_logging(verbose: u8) {
    let default = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = env::log_filter().unwrap_or_else(|| default.to_owned());
    // A second subscriber in one process (a caller's own) is left alone.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::builder().parse_lossy(filter))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .try_init();
}
