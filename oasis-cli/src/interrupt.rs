//! Ctrl-C: the first asks long loops to end, the second ends the process.

use crate::error::{CliError, CliResult, INTERRUPTED};
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Makes Ctrl-C set a flag that [`requested`] reads; from the second time on it ends the process at once.
///
/// Where no handler can be set, Ctrl-C ends the process as it always did.
pub fn catch() {
    let handler = || {
        if REQUESTED.swap(true, Ordering::SeqCst) {
            std::process::exit(INTERRUPTED.into());
        }
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        tracing::debug!("Ctrl-C is not caught: {error}");
    }
}

/// Ends a long loop after Ctrl-C.
///
/// # Errors
/// [`CliError::Interrupted`] when Ctrl-C was pressed since [`catch`].
pub fn check() -> CliResult {
    if requested() { Err(CliError::Interrupted) } else { Ok(()) }
}

/// Whether Ctrl-C was pressed since [`catch`].
pub fn requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}
