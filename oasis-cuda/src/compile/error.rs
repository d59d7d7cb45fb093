//! Why a kernel could not be compiled.

use std::borrow::Cow;

/// A kernel could not be compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// The compiler is not there.
    #[error(
        "run-time compiler: expected libnvrtc.so of CUDA 12 or 13, found none in {searched}\n  hint: scripts/fetch-nvrtc.sh \
         fetches it without a CUDA toolkit; OASIS_NVRTC_DIR names the folder that holds its lib/"
    )]
    NoCompiler {
        /// Where it was looked for.
        searched: String,
    },
    /// The library lacks a function or one of its calls failed.
    #[error("{operation}: {problem}")]
    Failed {
        /// Call.
        operation: &'static str,
        /// What went wrong.
        problem: String,
    },
    /// The source is at fault.
    #[error("{file} does not compile:\n{log}")]
    Rejected {
        /// Source file of the unit.
        file: Cow<'static, str>,
        /// The compiler's messages, each with the file and line that it is about.
        log: String,
    },
}
