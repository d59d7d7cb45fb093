//! Runs the real binary, away from the user's files and variables.

use std::path::Path;
use std::process::{Command, Output};

/// `oasis` in `folder`, which is also its home.
pub fn oasis(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oasis"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["OASIS_", "HF_", "HTTP", "http", "ALL_PROXY", "all_proxy", "NO_COLOR"].iter().any(|p| name.starts_with(p)) {
            command.env_remove(name);
        }
    }
    command.current_dir(folder).env("HOME", folder);
    command
}

/// Whether there is UCX; said aloud where there is none, and a failure where `OASIS_REQUIRE_UCX` is set.
#[allow(dead_code, reason = "not every test uses it")]
pub fn has_ucx() -> bool {
    match oasis_ucx::Search::default().version() {
        Ok(_) => true,
        Err(error) => {
            assert!(std::env::var_os("OASIS_REQUIRE_UCX").is_none(), "{error}");
            eprintln!("SKIPPED for UCX, which is missing: {error}");
            false
        }
    }
}

/// Exit code, standard output and standard error.
pub fn outcome(output: Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).expect("oasis prints UTF-8");
    (output.status.code().expect("oasis is not killed"), text(output.stdout), text(output.stderr))
}
