//! Errors of the command line and the exit codes they end with.

use oasis_core::config::ConfigError;
use oasis_core::executor::TooSmall;
use oasis_core::registry::CatalogueError;
use oasis_cuda::CudaUnavailable;
use oasis_cuda::device::DeviceError;
use oasis_models::checkpoint::CheckpointError;
use std::io;
use std::process::ExitCode;

/// Exit code after Ctrl-C: 128 and the number of SIGINT.
pub const INTERRUPTED: u8 = 130;

/// What a command returns.
pub type CliResult<T = ()> = Result<T, CliError>;

/// Why a command ended early.
#[derive(Debug)]
pub enum CliError {
    /// The input was wrong: arguments, configuration, files. The text says what was expected and what was found.
    Input(String),
    /// The work failed.
    Failure(String),
    /// Ctrl-C.
    Interrupted,
    /// Nobody reads the output any more, as in `oasis list | head -1`. Not worth a word.
    ClosedPipe,
}

impl CliError {
    /// Wrong input, with what to do about it.
    pub fn input(problem: impl Into<String>, hint: impl AsRef<str>) -> Self {
        Self::Input(format!("{}\n  hint: {}", problem.into(), hint.as_ref()))
    }

    /// Failed work, with what to do about it.
    pub fn failure(problem: impl Into<String>, hint: impl AsRef<str>) -> Self {
        Self::Failure(format!("{}\n  hint: {}", problem.into(), hint.as_ref()))
    }

    /// The same, said of one of several that are compared.
    #[must_use]
    pub fn of(self, policy: &str) -> Self {
        match self {
            Self::Input(text) => Self::Input(format!("policy {policy}: {text}")),
            Self::Failure(text) => Self::Failure(format!("policy {policy}: {text}")),
            other => other,
        }
    }

    /// The text to print after `error: `, if any.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Input(text) | Self::Failure(text) => Some(text),
            Self::Interrupted => Some("interrupted"),
            Self::ClosedPipe => None,
        }
    }

    /// The exit code of the process.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::ClosedPipe => 0,
            Self::Failure(_) => 1,
            Self::Input(_) => 2,
            Self::Interrupted => INTERRUPTED,
        })
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        Self::Input(error.to_string())
    }
}

impl From<CatalogueError> for CliError {
    fn from(error: CatalogueError) -> Self {
        Self::Input(error.to_string())
    }
}

impl From<CudaUnavailable> for CliError {
    fn from(error: CudaUnavailable) -> Self {
        Self::Input(error.to_string())
    }
}

impl From<oasis_ucx::Unavailable> for CliError {
    fn from(error: oasis_ucx::Unavailable) -> Self {
        Self::Input(error.to_string())
    }
}

impl From<DeviceError> for CliError {
    fn from(error: DeviceError) -> Self {
        Self::Failure(error.to_string())
    }
}

impl From<CheckpointError> for CliError {
    fn from(error: CheckpointError) -> Self {
        let problem = error.problem();
        Self::input(format!("{}: expected {}, found {}", problem.what, problem.expected, problem.found), &problem.hint)
    }
}

impl From<io::Error> for CliError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::ClosedPipe,
            _ => Self::Failure(error.to_string()),
        }
    }
}

impl From<serde_json::Error> for CliError {
    fn from(error: serde_json::Error) -> Self {
        io::Error::from(error).into()
    }
}

impl From<anyhow::Error> for CliError {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast_ref::<TooSmall>() {
            Some(TooSmall(reason)) => Self::Input(reason.clone()),
            None => Self::Failure(format!("{error:#}")),
        }
    }
}
