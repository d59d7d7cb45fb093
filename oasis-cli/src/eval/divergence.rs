//! Divergence: when a policy's greedy answer leaves that of dense decoding, and how far its distributions are.

use crate::error::CliResult;
use crate::eval::device::{Device, Progress};
use crate::eval::logits::{Pair, choice, compare, divergence};
use crate::eval::running::Traffic;
use crate::eval::setting::Contender;
use crate::eval::statistics::{mean_of_steps, wilson};
use crate::eval::window::{Window, describe_contexts};
use crate::text::columns;
use serde::Serialize;

/// What one policy did along dense decoding's own greedy answers. The first step of each, which sees the full KV with
/// every policy, is left out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Divergence {
    /// Policy.
    pub policy: String,
    /// Answers.
    pub windows: usize,
    /// Steps compared.
    pub steps: usize,
    /// Answers that become different ones.
    pub diverged: usize,
    /// Number of the first different token of each answer, the first token being 1; absent where all are the same.
    pub first_difference: Vec<Option<usize>>,
    /// Share of steps in which both would choose the same token.
    pub same_choice: f64,
    /// Lower bound of that share with 95% confidence.
    pub same_choice_low: f64,
    /// Upper bound.
    pub same_choice_high: f64,
    /// Mean Kullback-Leibler divergence of the policy's distribution from dense decoding's, nats.
    pub kl: f64,
    /// Lower bound of the mean with 95% confidence.
    pub kl_low: f64,
    /// Upper bound.
    pub kl_high: f64,
    /// The largest of any step.
    pub kl_most: f64,
    /// Of each step after the first, mean over answers.
    pub kl_by_step: Vec<f64>,
    /// Mean bytes over the link a decode step, first working sets left out.
    pub link_bytes_per_step: f64,
}

/// One policy along one answer: of each step after the first the divergence, and whether the choice is the same.
type Steps = Vec<(f64, bool)>;

/// Measures every contender on the greedy continuations of `windows`' contexts; `progress` hears of each of each.
///
/// # Errors
/// When a contender's settings are wrong or a request fails.
pub fn measure(
    device: &Device<'_>,
    contenders: &[Contender],
    windows: &[Window],
    progress: &mut Progress<'_>,
) -> CliResult<Vec<Divergence>> {
    let mut of_contenders: Vec<Vec<Steps>> = vec![Vec::new(); contenders.len()];
    let traffic = compare(device, contenders, windows, true, progress, |pair| {
        let Pair { contender, dense, own, .. } = pair;
        let steps = dense.iter().zip(own).skip(1);
        let steps = steps.map(|(dense, own)| (divergence(dense, own), choice(dense) == choice(own)));
        of_contenders[contender].push(steps.collect());
    })?;
    let rows = contenders.iter().zip(of_contenders).zip(traffic);
    Ok(rows.map(|((contender, steps), traffic)| Divergence::new(contender.name(), &steps, traffic)).collect())
}

impl Divergence {
    fn new(policy: &str, windows: &[Steps], traffic: Traffic) -> Self {
        // Steps count from 0, and step `i` chooses token `i + 2`.
        let first = |steps: &Steps| steps.iter().position(|(_, same)| !same).map(|skipped| skipped + 3);
        let first_difference: Vec<Option<usize>> = windows.iter().map(first).collect();
        let all = || windows.iter().flatten();
        let (steps, same) = (all().count(), all().filter(|(_, same)| *same).count());
        let nats: Vec<Vec<f64>> = windows.iter().map(|steps| steps.iter().map(|(kl, _)| *kl).collect()).collect();
        let kl = mean_of_steps(nats.iter().map(Vec::as_slice));
        let longest = nats.iter().map(Vec::len).max().unwrap_or(0);
        let of_step = |index: usize| {
            let there: Vec<f64> = nats.iter().filter_map(|nats| nats.get(index)).copied().collect();
            there.iter().sum::<f64>() / there.len() as f64
        };
        let (same_choice_low, same_choice_high) = wilson(same, steps);
        Self {
            policy: policy.to_owned(),
            windows: windows.len(),
            steps,
            diverged: first_difference.iter().flatten().count(),
            first_difference,
            same_choice: same as f64 / steps as f64,
            same_choice_low,
            same_choice_high,
            kl: kl.mean,
            kl_low: kl.low,
            kl_high: kl.high,
            kl_most: all().map(|(kl, _)| *kl).fold(0.0, f64::max),
            kl_by_step: (0..longest).map(of_step).collect(),
            link_bytes_per_step: traffic.bytes_per_step(),
        }
    }
}

/// The measurements as a table.
pub fn render(rows: &[Divergence], windows: &[Window], budget: &str) -> String {
    let mut text = format!(
        "along dense decoding's greedy answers; budget {budget} blocks, {}, {} steps\n\n",
        describe_contexts(windows.iter().map(|w| w.context.len())),
        rows.first().map_or(0, |row| row.steps),
    );
    let head =
        ["policy", "answers that differ", "from token", "same choice", "KL, nats", "low", "high", "most", "KiB/step"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let from: Vec<String> = row.first_difference.iter().flatten().map(usize::to_string).collect();
        let mut cells = vec![
            row.policy.clone(),
            format!("{} of {}", row.diverged, row.windows),
            if from.is_empty() { "-".to_owned() } else { from.join(" ") },
            format!("{:.4}", row.same_choice),
        ];
        cells.extend([row.kl, row.kl_low, row.kl_high, row.kl_most].map(|kl| format!("{kl:.5}")));
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
    fn the_first_difference_is_a_token_of_the_answer() {
        let windows = [vec![(0.0, true), (0.5, false), (0.1, true)], vec![(0.2, true)]];
        let row = Divergence::new("x", &windows, Traffic::default());
        // Token 1 comes from the prompt, token 2 from the step that is left out.
        assert_eq!(row.first_difference, [Some(4), None]);
        assert_eq!((row.diverged, row.steps, row.same_choice, row.kl_most), (1, 4, 0.75, 0.5));
        assert!((row.kl - 0.2).abs() < 1e-12, "{row:?}");
        assert_eq!(row.kl_by_step, [0.1, 0.5, 0.1]);
    }
}
