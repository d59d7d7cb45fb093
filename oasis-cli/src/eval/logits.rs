//! Logits of policies beside those of dense decoding, over the same tokens.

use crate::error::CliResult;
use crate::eval::device::{Device, Progress, Prompt, Turn};
use crate::eval::running::{Running, Traffic};
use crate::eval::setting::Contender;
use crate::eval::window::Window;
use oasis_core::config::Budget;

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
/// receives the logits, window by window for one contender, and `progress` hears of each pair. Gives what each
/// contender moved over the link.
///
/// # Errors
/// When a contender's settings are wrong or a request fails.
pub fn compare(
    device: &Device<'_>,
    contenders: &[Contender],
    windows: &[Window],
    greedy: bool,
    progress: &mut Progress<'_>,
    mut each: impl FnMut(Pair<'_>),
) -> CliResult<Vec<Traffic>> {
    // What is dense is the reference itself.
    let mut sparse = Vec::new();
    for (index, contender) in contenders.iter().enumerate() {
        let resolved = device.setting().of(contender).map_err(|error| error.of(contender.name()))?;
        if resolved.config.kv.budget_blocks != Budget::All {
            sparse.push(index);
        }
    }
    let reference = Contender::dense();
    let running: Vec<&Contender> = std::iter::once(&reference).chain(sparse.iter().map(|i| &contenders[*i])).collect();
    let prompts: Vec<Prompt<'_>> =
        (windows.iter()).map(|window| Prompt { tokens: &window.context, new_tokens: window.forced.len() }).collect();
    let mut windows = windows.to_vec();
    let mut dense: Vec<Logits> = vec![Logits::new(); windows.len()];
    let mut traffic = vec![Traffic::default(); contenders.len()];
    device.run(&running, &prompts, progress, &mut |turn| {
        let Turn { contender, prompt, running: request } = turn;
        let (window, last) = (&mut windows[prompt], contender + 1 == running.len());
        let mut logits = Logits::with_capacity(window.forced.len());
        let note = |request: &Running<'_>| {
            logits.push(request.logits()?);
            Ok(())
        };
        match contender {
            0 => {
                if greedy {
                    window.continue_greedily(request, note)?
                } else {
                    window.follow(request, note)?
                };
                dense[prompt] = logits;
                for contender in (0..contenders.len()).filter(|index| !sparse.contains(index)) {
                    each(Pair { contender, window, dense: &dense[prompt], own: &dense[prompt] });
                }
            }
            _ => {
                let contender = sparse[contender - 1];
                traffic[contender] += window.follow(request, note)?;
                each(Pair { contender, window, dense: &dense[prompt], own: &logits });
            }
        }
        if last {
            // Nobody else is compared with them.
            dense[prompt] = Logits::new();
        }
        Ok(())
    })?;
    Ok(traffic)
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
