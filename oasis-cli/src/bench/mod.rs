//! Measurements of speed beside their floors.

pub mod cpu;
pub mod gpu;

use crate::error::{CliError, CliResult};
use crate::text::grouped;
use oasis_core::config::{ConfigError, DeviceKind, Resolved};

/// The longest request of a measurement, in tokens.
pub struct Longest {
    /// The argument that says how long its prompt is.
    pub argument: &'static str,
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Tokens that follow the prompt.
    pub after: usize,
    /// What makes it shorter.
    pub hint: &'static str,
}

impl Longest {
    /// Tokens of prompt and answer together.
    ///
    /// # Errors
    /// When `model` has fewer than that: its `positions`.
    pub fn within(&self, positions: usize, model: &str) -> CliResult<usize> {
        let Self { argument, prompt, after, hint } = self;
        if prompt + after <= positions {
            return Ok(prompt + after);
        }
        let [most, after, positions, prompt] =
            [positions.saturating_sub(*after), *after, positions, *prompt].map(|tokens| grouped(tokens as u64));
        let why = format!("{after} more are decoded and {model} has {positions} positions");
        Err(CliError::input(format!("{argument}: expected at most {most} tokens, as {why}, found {prompt}"), hint))
    }
}

/// Refuses settings that name another device than the one that is measured.
///
/// # Errors
/// Names where the other one came from.
pub fn expect_device(resolved: &Resolved, kind: DeviceKind) -> CliResult {
    let found = resolved.config.device.kind;
    if found == kind {
        return Ok(());
    }
    let hint = match kind {
        DeviceKind::Cpu => "`oasis bench decode` and the others measure a GPU",
        DeviceKind::Cuda => "`oasis bench cpu` measures the CPU",
    };
    let error = ConfigError::new("device.kind", format!("{kind}, which is measured here"), found).hint(hint);
    Err(resolved.locate(error).into())
}
