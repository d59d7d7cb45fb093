//! The `oasis` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    oasis_cli::main()
}
