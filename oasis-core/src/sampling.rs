//! How the next token is chosen from logits.

use serde::{Deserialize, Serialize};

/// Parameters of a sampler. The default is greedy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingParams {
    /// Logits are divided by this; 0 means greedy.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keep the `top_k` likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Seed of the request's random numbers.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }
}
