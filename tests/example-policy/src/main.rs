//! `oasis` with one more selector.

use oasis_example_policy as _;

fn main() -> std::process::ExitCode {
    oasis_cli::main()
}
