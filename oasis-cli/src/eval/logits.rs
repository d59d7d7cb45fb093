//! Logits of policies beside those of dense decoding, over the same tokens.

use crate::error::{CliError, CliResult};
use crate::eval::setting::{Contender, Setting};
use crate::eval::window::Window;
use oasis_core::executor::Executor;
use oasis_models::cpu::{CpuExecutor, PromptState};

/// Logits of the steps of one window, `[steps][vocab]`.
pub type Logits = Vec<Vec<f32>>;

/// One policy's and dense decoding's logits along one window.
pub struct Pair<'a> {
    /// Which contender.
    pub contender: usize,
    /// Tokens that were forced: those of step `i` are for `forced[i + 1]`.
    pub window: &'a Window,
    /// Of dense decoding.
    pub dense: &'a Logits,
    /// Of the policy.
    pub own: &'a Logits,
}

/// Follows `windows`, or the model's own greedy continuation of their contexts, densely and with each contender; `each`
/// receives the logits and `progress` hears of each window. Gives the mean bytes over the link a decode step of each
/// contender, first working sets left out.
///
/// # Errors
/// When a contender's settings are wrong or a request fails.
pub fn compare(
    setting: &Setting<'_>,
    contenders: &[Contender],
    windows: &[Window],
    greedy: bool,
    mut progress: impl FnMut(usize),
    mut each: impl FnMut(Pair<'_>),
) -> CliResult<Vec<f64>> {
    let mut dense = setting.dense()?;
    let mut executors =
        contenders.iter().map(|contender| contender.executor(setting)).collect::<CliResult<Vec<_>>>()?;
    for (done, window) in windows.iter().enumerate() {
        if crate::interrupt::requested() {
            return Err(CliError::Interrupted);
        }
        let state = PromptState::read(&setting.weights, &window.context, setting.prefill_chunk, &mut |_, _| ());
        let mut window = window.clone();
        if greedy {
            window.continue_greedily(&mut dense, &state)?;
        }
        let reference = follow(&mut dense, &state, &window)?;
        for (contender, executor) in executors.iter_mut().enumerate() {
            let own = match executor.info().budget_blocks {
                None => None,
                Some(_) => Some(follow(executor, &state, &window)?),
            };
            each(Pair { contender, window: &window, dense: &reference, own: own.as_ref().unwrap_or(&reference) });
        }
        progress(done + 1);
    }
    let bytes = executors.into_iter().map(|executor| {
        let stats = executor.stats();
        stats.link_bytes as f64 / stats.steps.max(1) as f64
    });
    Ok(bytes.collect())
}

fn follow(executor: &mut CpuExecutor, state: &PromptState, window: &Window) -> CliResult<Logits> {
    let mut logits = Vec::with_capacity(window.forced.len());
    window.follow(executor, state, |_, step| logits.push(step.to_vec()))?;
    Ok(logits)
}

/// Natural logarithms of the probabilities that logits stand for.
pub fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = logits.iter().map(|logit| f64::from(logit - largest));
    let total = shifted.clone().map(f64::exp).sum::<f64>().ln();
    shifted.map(|logit| logit - total).collect()
}

/// How far `own` is from `dense`, both logits: the Kullback-Leibler divergence of their distributions in nats.
pub fn divergence(dense: &[f32], own: &[f32]) -> f64 {
    let (dense, own) = (log_probabilities(dense), log_probabilities(own));
    dense.iter().zip(&own).map(|(p, q)| p.exp() * (p - q)).filter(|part| !part.is_nan()).sum()
}

/// The most likely token of logits; of several the first.
pub fn choice(logits: &[f32]) -> usize {
    logits.iter().enumerate().fold(0, |best, (token, logit)| if *logit > logits[best] { token } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_that_of_the_distributions() {
        // Probabilities 1/4, 3/4 and 1/2, 1/2, whatever is added to the logits.
        let (p, q) = ([5.0, 5.0 + 3.0_f32.ln()], [-80.0, -80.0]);
        let expected = 0.25 * 0.5_f64.ln() + 0.75 * 1.5_f64.ln();
        assert!((divergence(&p, &q) - expected).abs() < 1e-6, "{}", divergence(&p, &q));
        assert_eq!(divergence(&p, &p), 0.0);
        // A token that dense decoding rules out counts for nothing.
        assert!((divergence(&[0.0, f32::NEG_INFINITY], &[0.0, 0.0]) - 2.0_f64.ln()).abs() < 1e-6);
        assert_eq!((choice(&[1.0, 3.0, 3.0]), choice(&[0.0])), (1, 0));
    }
}
