//! Contexts and the tokens that are decoded after them.

use crate::error::{CliError, CliResult};
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::{CpuExecutor, PromptState};

/// A context and the tokens that follow it; the normal token is forced along them.
#[derive(Debug, Clone)]
pub struct Window {
    /// Tokens before the first measured step.
    pub context: Vec<TokenId>,
    /// Tokens of the measured steps, and the one after the last.
    pub forced: Vec<TokenId>,
}

/// How many contexts there are and how long, in words.
pub fn describe_contexts(lengths: impl Iterator<Item = usize> + Clone) -> String {
    let (shortest, longest) = (lengths.clone().min().unwrap_or(0), lengths.clone().max().unwrap_or(0));
    format!("{} contexts of {shortest} to {longest} tokens", lengths.count())
}

impl Window {
    /// Windows of `context + steps + 1` tokens from a text, at most `count`, spread evenly over it.
    ///
    /// # Errors
    /// When the text has not even one.
    pub fn cut(tokens: &[TokenId], context: usize, steps: usize, count: usize) -> CliResult<Vec<Self>> {
        let length = context + steps + 1;
        let Some(room) = tokens.len().checked_sub(length) else {
            return Err(CliError::input(
                format!("the text: expected at least {length} tokens, found {}", tokens.len()),
                "choose a longer text, or lower --context or --steps",
            ));
        };
        // Overlapping windows would count the same steps twice.
        let count = count.clamp(1, tokens.len() / length);
        let starts = (0..count).map(|i| if count == 1 { 0 } else { room * i / (count - 1) });
        Ok(starts
            .map(|start| {
                let (context, forced) = tokens[start..start + length].split_at(context);
                Self { context: context.to_vec(), forced: forced.to_vec() }
            })
            .collect())
    }

    /// Replaces the forced tokens by the model's own greedy continuation of the context, whose `state` it is.
    ///
    /// # Errors
    /// When the request fails.
    pub fn continue_greedily(&mut self, dense: &mut CpuExecutor, state: &PromptState) -> CliResult {
        let request = RequestId(1);
        let mut token = dense.resume(state, request, self.forced.len(), SamplingParams::default())?;
        for index in 0..self.forced.len() {
            self.forced[index] = token;
            if index + 1 < self.forced.len() {
                let next = dense.decode(&[DecodeRow { request, token }])?.remove(0);
                token = next.map_err(|error| CliError::Failure(error.to_string()))?;
            }
        }
        dense.release(request);
        Ok(())
    }

    /// Decodes the forced tokens. `seen` receives the number of the step, from 0, and its logits, `[vocab]`, which are for
    /// the forced token after it.
    ///
    /// # Errors
    /// When the request fails.
    pub fn follow(
        &self,
        executor: &mut CpuExecutor,
        state: &PromptState,
        mut seen: impl FnMut(usize, &[f32]),
    ) -> CliResult {
        let request = RequestId(1);
        executor.resume(state, request, self.forced.len(), SamplingParams::default())?;
        for (index, &token) in self.forced[..self.forced.len() - 1].iter().enumerate() {
            let decoded = executor.decode(&[DecodeRow { request, token }])?.remove(0);
            decoded.map_err(|error| CliError::Failure(error.to_string()))?;
            seen(index, executor.logits(request).unwrap_or_default());
        }
        executor.release(request);
        Ok(())
    }
}
