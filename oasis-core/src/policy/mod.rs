//! The three policy roles: what a block is summarised by, which blocks the next step will want, which of them are
//! admitted.
//!
//! Every role has two objects: an inert *spec*, deserialised from configuration by its `kind`, and the built object
//! that holds scratch memory. Each stage owns its own object, so methods take `&mut self` where they need scratch.
//! There is one virtual call per role and (layer, step) for the whole batch, never one a block.

mod predictor;
mod selector;
mod summarizer;

pub use predictor::{
    Correction, HashSeed, Kept, PredictBatch, PredictRequest, Predictor, PredictorSpec, QuerySource, ScoreRanking,
    ScoreSource, rank_adjusted, rank_by_score, split_mix64,
};
pub use selector::{LinkRate, SelectBatch, SelectRequest, Selector, SelectorSpec};
pub use summarizer::{Aggregate, ScoreTask, SummarizeTask, Summarizer, SummarizerSpec};

/// CUDA C++ source that an executor composes into its kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCode {
    /// File name shown in compile errors.
    pub name: &'static str,
    /// Source of the policy's device struct.
    pub source: &'static str,
    /// A number that the source refers to as `POLICY_CONSTANT`, an unsigned 64-bit integer: of a float, its bits.
    pub constant: Option<u64>,
}

impl DeviceCode {
    /// Code that is the same whatever the policy's settings.
    pub const fn new(name: &'static str, source: &'static str) -> Self {
        Self { name, source, constant: None }
    }
}

/// Why a spec could not be built: one field, what it should be, what it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, found {found}{}", hint.as_ref().map(|h| format!("; {h}")).unwrap_or_default())]
pub struct SpecError {
    /// Field of the spec.
    pub field: &'static str,
    /// What the field should be.
    pub expected: String,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl SpecError {
    /// An error about `field`.
    pub fn new(field: &'static str, expected: impl Into<String>, found: impl ToString) -> Self {
        Self { field, expected: expected.into(), found: found.to_string(), hint: None }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}
