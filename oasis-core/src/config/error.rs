//! Configuration errors: the key, what was expected, what was found, where it came from, what to do.

use crate::config::Origin;
use std::fmt;

/// One wrong value, key or kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Dotted key, such as `selector.fetch_ratio`.
    pub key: String,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub found: String,
    /// Where the value came from.
    pub origin: Option<Origin>,
    /// What to do about it.
    pub hint: Option<String>,
}

impl ConfigError {
    /// An error about `key`.
    pub fn new(key: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> Self {
        Self { key: key.into(), expected: expected.into(), found: found.to_string(), origin: None, hint: None }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds where the value came from, unless it is known already.
    #[must_use]
    pub fn from_origin(mut self, origin: Option<&Origin>) -> Self {
        self.origin = self.origin.or_else(|| origin.cloned());
        self
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, found {}", self.key, self.expected, self.found)?;
        if let Some(origin) = &self.origin {
            write!(f, " (from {origin})")?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}
