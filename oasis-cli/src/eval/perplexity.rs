//! Perplexity: how surprised a policy is by a text, beside dense decoding.

use crate::error::CliResult;
use crate::eval::device::{Device, Progress};
use crate::eval::logits::{Pair, compare, log_probabilities};
use crate::eval::running::Traffic;
use crate::eval::setting::Contender;
use crate::eval::statistics::mean_of_steps;
use crate::eval::window::{Window, describe_contexts};
use crate::text::columns;
use serde::Serialize;

/// What one policy made of the text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Perplexity {
    /// Policy.
    pub policy: String,
    /// Tokens predicted. The first step of each window is left out: it sees the full KV with every policy.
    pub tokens: usize,
    /// Exponential of the mean negative logarithm of the tokens' probabilities.
    pub perplexity: f64,
    /// The same of dense decoding.
    pub perplexity_dense: f64,
    /// Perplexity as a multiple of dense decoding's: 1 where nothing is lost.
    pub ratio: f64,
    /// Lower bound of the ratio with 95% confidence, by token-wise differences to dense decoding.
    pub ratio_low: f64,
    /// Upper bound.
    pub ratio_high: f64,
    /// Mean bytes over the link a decode step, first working sets left out.
    pub link_bytes_per_step: f64,
}

/// Nats of the forced tokens of one window after its first step: how unlikely they were.
type Nats = Vec<f64>;

/// Measures every contender along `windows`; `progress` hears of each window of each.
///
/// # Errors
/// When a contender's settings are wrong or a request fails.
pub fn measure(
    device: &Device<'_>,
    contenders: &[Contender],
    windows: &[Window],
    progress: &mut Progress<'_>,
) -> CliResult<Vec<Perplexity>> {
    let mut of_contenders: Vec<Vec<(Nats, Nats)>> = vec![Vec::new(); contenders.len()];
    let traffic = compare(device, contenders, windows, false, progress, |pair| {
        let Pair { contender, window, dense, own } = pair;
        let nats = |logits: &Vec<Vec<f32>>| -> Nats {
            let steps = logits.iter().zip(&window.forced[1..]).skip(1);
            steps.map(|(logits, token)| -log_probabilities(logits)[token.index()]).collect()
        };
        of_contenders[contender].push((nats(own), nats(dense)));
    })?;
    let rows = contenders.iter().zip(of_contenders).zip(traffic);
    Ok(rows.map(|((contender, nats), traffic)| Perplexity::new(contender.name(), &nats, traffic)).collect())
}

impl Perplexity {
    /// From a policy's and dense decoding's nats, window by window.
    fn new(policy: &str, windows: &[(Nats, Nats)], traffic: Traffic) -> Self {
        let differences: Vec<Nats> = windows
            .iter()
            .map(|(own, dense)| own.iter().zip(dense).map(|(own, dense)| own - dense).collect())
            .collect();
        let ratio = mean_of_steps(differences.iter().map(Vec::as_slice));
        Self {
            policy: policy.to_owned(),
            tokens: differences.iter().map(Vec::len).sum(),
            perplexity: mean_of_steps(windows.iter().map(|(own, _)| own.as_slice())).mean.exp(),
            perplexity_dense: mean_of_steps(windows.iter().map(|(_, dense)| dense.as_slice())).mean.exp(),
            ratio: ratio.mean.exp(),
            ratio_low: ratio.low.exp(),
            ratio_high: ratio.high.exp(),
            link_bytes_per_step: traffic.bytes_per_step(),
        }
    }
}

/// The measurements as a table.
pub fn render(rows: &[Perplexity], windows: &[Window], budget: &str) -> String {
    let mut text = format!(
        "perplexity of forced tokens and its ratio to dense decoding's, with a paired 95% interval;\n\
         budget {budget} blocks, {}, {} tokens predicted\n\n",
        describe_contexts(windows.iter().map(|w| w.context.len())),
        rows.first().map_or(0, |row| row.tokens),
    );
    let mut lines = vec![["policy", "perplexity", "ratio", "low", "high", "KiB/step"].map(str::to_owned).to_vec()];
    for row in rows {
        let mut cells = vec![row.policy.clone(), format!("{:.4}", row.perplexity)];
        cells.extend([row.ratio, row.ratio_low, row.ratio_high].map(|ratio| format!("{ratio:.4}")));
        cells.push(format!("{:.0}", row.link_bytes_per_step / 1024.0));
        lines.push(cells);
    }
    text.push_str(&columns(&lines).join("\n"));
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_that_of_the_perplexities() {
        let windows = [(vec![2.0, 1.0, 3.0], vec![1.0, 1.0, 2.0]), (vec![0.5], vec![1.5])];
        let row = Perplexity::new("x", &windows, Traffic::default());
        assert_eq!(row.tokens, 4);
        assert!((row.perplexity - (6.5_f64 / 4.0).exp()).abs() < 1e-9, "{row:?}");
        assert!((row.ratio - row.perplexity / row.perplexity_dense).abs() < 1e-9, "{row:?}");
        assert!(row.ratio_low < row.ratio && row.ratio < row.ratio_high, "{row:?}");
    }
}
