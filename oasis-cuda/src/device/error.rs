//! Errors of the device.

use cudarc::driver::DriverError;
use std::fmt::Display;

/// An operation of the device that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {problem}{}", hint.as_ref().map(|hint| format!("\n  hint: {hint}")).unwrap_or_default())]
pub struct DeviceError {
    /// What was being done.
    pub operation: String,
    /// What went wrong; the driver's own name for it where it came from there.
    pub problem: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl DeviceError {
    pub(crate) fn new(operation: impl Into<String>, problem: impl Display) -> Self {
        Self { operation: operation.into(), problem: problem.to_string(), hint: None }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Names the operation that a driver's answer belongs to.
pub(super) trait Check<T> {
    fn check<O: Into<String>>(self, operation: impl FnOnce() -> O) -> Result<T, DeviceError>;
}

impl<T> Check<T> for Result<T, DriverError> {
    fn check<O: Into<String>>(self, operation: impl FnOnce() -> O) -> Result<T, DeviceError> {
        self.map_err(|error| {
            let text = |found: Result<&std::ffi::CStr, DriverError>| {
                found.map_or_else(|_| format!("{:?}", error.0), |text| text.to_string_lossy().into_owned())
            };
            DeviceError::new(operation(), format!("{} ({})", text(error.error_name()), text(error.error_string())))
        })
    }
}
