//! Contexts and the tokens that are decoded after them.

use crate::error::{CliError, CliResult};
use crate::eval::running::{Running, Traffic};
use crate::text::grouped;
use oasis_core::ids::TokenId;

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

/// Says on standard error that there are fewer windows than were asked for; `found` says how many.
pub fn warn_of_fewer(there: usize, asked: usize, found: impl Fn(usize) -> String) {
    if there < asked {
        eprintln!("warning: {}, {} were asked for", found(there), grouped(asked as u64));
    }
}

/// Tokens of the longest window; 0 where there is none.
pub fn longest(windows: &[Window]) -> usize {
    windows.iter().map(|window| window.context.len() + window.forced.len()).max().unwrap_or(0)
}

impl Window {
    /// Windows of `context + steps + 1` tokens from a text, `count` or as many as it has room for, spread evenly over it.
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
        let most = tokens.len() / length;
        warn_of_fewer(most, count, |room| {
            let windows = if room == 1 { "1 window" } else { &format!("{room} windows") };
            format!("the text has room for {windows} of {} tokens", grouped(length as u64))
        });
        let count = count.clamp(1, most);
        let starts = (0..count).map(|i| if count == 1 { 0 } else { room * i / (count - 1) });
        Ok(starts
            .map(|start| {
                let (context, forced) = tokens[start..start + length].split_at(context);
                Self { context: context.to_vec(), forced: forced.to_vec() }
            })
            .collect())
    }

    /// Replaces the forced tokens by the model's own greedy continuation of the context, which `running` has read. `seen`
    /// is shown the request after every step, as in [`follow`](Self::follow).
    ///
    /// # Errors
    /// When the request or `seen` fails.
    pub fn continue_greedily(
        &mut self,
        mut running: Running<'_>,
        mut seen: impl FnMut(&Running<'_>) -> CliResult,
    ) -> CliResult<Traffic> {
        self.forced[0] = running.first();
        for index in 1..self.forced.len() {
            self.forced[index] = running.step(self.forced[index - 1])?;
            seen(&running)?;
        }
        Ok(running.end())
    }

    /// Decodes the forced tokens after the context, which `running` has read. `seen` is shown the request after every
    /// step: its logits are for the forced token after the one that ran.
    ///
    /// # Errors
    /// When the request or `seen` fails.
    pub fn follow(
        &self,
        mut running: Running<'_>,
        mut seen: impl FnMut(&Running<'_>) -> CliResult,
    ) -> CliResult<Traffic> {
        for &token in &self.forced[..self.forced.len() - 1] {
            running.step(token)?;
            seen(&running)?;
        }
        Ok(running.end())
    }
}
