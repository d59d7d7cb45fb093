//! A request that decodes, on whichever device, and what it moves over the link.

use crate::error::{CliError, CliResult};
use crate::generate::read_prompt;
use oasis_core::executor::{Admission, DecodeRow, Executor, ExecutorStats, Logits, Sequence};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::{CpuExecutor, PromptState};
use std::ops::AddAssign;

/// The only request of an executor.
pub const REQUEST: RequestId = RequestId(1);

/// Decode steps and what they moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Decode steps.
    steps: u64,
    /// Bytes over the link, first working sets left out.
    bytes: u64,
}

impl Traffic {
    /// Mean bytes over the link a decode step, first working sets left out.
    pub fn bytes_per_step(self) -> f64 {
        self.bytes as f64 / self.steps.max(1) as f64
    }

    /// From `before` to `after`.
    fn between(before: &ExecutorStats, after: &ExecutorStats) -> Self {
        Self { steps: after.steps - before.steps, bytes: after.link_bytes - before.link_bytes }
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.bytes += other.bytes;
    }
}

/// A greedy request whose prompt has been read, alone on its executor.
pub struct Running<'a> {
    executor: &'a mut dyn Logits,
    first: TokenId,
    before: ExecutorStats,
}

impl<'a> Running<'a> {
    /// Takes a prompt that was read before; at most `tokens` tokens follow it.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn resume(executor: &'a mut CpuExecutor, state: &PromptState, tokens: usize) -> CliResult<Self> {
        let before = executor.stats();
        let first = executor.resume(state, REQUEST, tokens, SamplingParams::default())?;
        Ok(Self { executor, first, before })
    }

    /// Reads a prompt; at most `tokens` tokens follow it.
    ///
    /// # Errors
    /// When there is no room for it, or the request fails.
    pub fn read(executor: &'a mut dyn Logits, prompt: &[TokenId], tokens: usize) -> CliResult<Self> {
        let before = executor.stats();
        let sampling = SamplingParams::default();
        let sequence = Sequence { request: REQUEST, prompt: prompt.to_vec(), max_new_tokens: tokens, sampling };
        match executor.admit(sequence)? {
            Admission::Admitted => {}
            Admission::Wait { reason } | Admission::Refused { reason } => return Err(CliError::Input(reason)),
        }
        let first = read_prompt(executor, REQUEST)?;
        Ok(Self { executor, first, before })
    }

    /// The token after the prompt.
    pub fn first(&self) -> TokenId {
        self.first
    }

    /// Runs `token`; gives the one after it.
    ///
    /// # Errors
    /// When the request fails.
    pub fn step(&mut self, token: TokenId) -> CliResult<TokenId> {
        let next = self.executor.decode(&[DecodeRow { request: REQUEST, token }])?.remove(0);
        next.map_err(|error| CliError::Failure(error.to_string()))
    }

    /// Logits of the token after the last one run, `[vocab]`.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn logits(&self) -> CliResult<Vec<f32>> {
        Ok(self.executor.last_logits(REQUEST)?)
    }

    /// Ends the request.
    pub fn end(self) -> Traffic {
        self.executor.release(REQUEST);
        Traffic::between(&self.before, &self.executor.stats())
    }
}
