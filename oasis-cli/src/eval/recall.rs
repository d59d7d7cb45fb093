//! Recall: exact match of greedy answers, policy by policy, over one prefill of each prompt.

use crate::error::{CliError, CliResult};
use crate::eval::setting::{Contender, Setting};
use crate::eval::statistics::wilson;
use crate::eval::tasks::Task;
use crate::text::columns;
use oasis_core::config::Config;
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::{CpuExecutor, PromptState};
use serde::Serialize;
use std::collections::BTreeMap;

/// Tasks that are reported but left out of the headline: dense attention fails the first, a context of nothing but
/// facts is too dense for block summaries in the second.
const HARD: [&str; 2] = ["hop2", "kv_dense"];

/// What one policy did at one length.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Score {
    /// Policy.
    pub policy: String,
    /// Length class of the prompts, tokens.
    pub length: usize,
    /// Right answers and prompts, per task.
    pub tasks: BTreeMap<String, (usize, usize)>,
    /// Share of right answers over all tasks but the hard two.
    pub exact_match: f64,
    /// Lower bound of that share with 95% confidence.
    pub exact_match_low: f64,
    /// Upper bound.
    pub exact_match_high: f64,
    /// Share of right answers over all tasks.
    pub exact_match_all: f64,
    /// Mean bytes over the link a decode step, first working sets left out.
    pub link_bytes_per_step: f64,
}

impl Score {
    /// Shares from counts.
    fn add_up(&mut self) {
        let share = |(right, all): (usize, usize)| right as f64 / all.max(1) as f64;
        let (right, all) = self.headline();
        (self.exact_match_low, self.exact_match_high) = wilson(right, all);
        self.exact_match = share((right, all));
        self.exact_match_all = share(self.all());
    }

    /// Right answers and prompts over the tasks that `keep` keeps.
    fn sum(&self, keep: impl Fn(&str) -> bool) -> (usize, usize) {
        let kept = self.tasks.iter().filter(|(task, _)| keep(task));
        kept.fold((0, 0), |(right, all), (_, (r, n))| (right + r, all + n))
    }

    /// Over all tasks but the hard two.
    pub fn headline(&self) -> (usize, usize) {
        self.sum(|task| !HARD.contains(&task))
    }

    /// Over all tasks.
    pub fn all(&self) -> (usize, usize) {
        self.sum(|_| true)
    }
}

/// Runs all contenders over the prompts of one length; `progress` hears of each prompt.
///
/// # Errors
/// When a contender's settings are wrong, a prompt is too long, or a request fails.
pub fn measure(
    setting: &Setting<'_>,
    contenders: &[Contender],
    tasks: &[&Task],
    mut progress: impl FnMut(usize),
) -> CliResult<Vec<Score>> {
    let mut executors = contenders
        .iter()
        .map(|contender| Ok((contender, contender.executor(setting)?, Score::default())))
        .collect::<CliResult<Vec<_>>>()?;
    for (done, task) in tasks.iter().enumerate() {
        if crate::interrupt::requested() {
            return Err(CliError::Interrupted);
        }
        let prompt = setting.text.encode_chat(None, task.question())?;
        let answer: Vec<TokenId> = setting.text.encode(&task.answer)?;
        let limit = setting.weights.spec().max_positions;
        if prompt.len() + answer.len() + 1 > limit {
            return Err(CliError::input(
                format!(
                    "task {}: expected a context within {limit} tokens, found {} with its answer",
                    task.id,
                    prompt.len() + answer.len() + 1
                ),
                "choose shorter tasks with --length",
            ));
        }
        let state = PromptState::read(&setting.weights, &prompt, setting.prefill_chunk, &mut |_, _| ());
        for (contender, executor, score) in &mut executors {
            let right = answers(executor, &state, &answer, &setting.text.stop_tokens())?;
            contender.name().clone_into(&mut score.policy);
            score.length = task.length;
            let (hits, all) = score.tasks.entry(task.task.clone()).or_default();
            *hits += usize::from(right);
            *all += 1;
        }
        progress(done + 1);
    }
    let scores = executors.into_iter().map(|(_, executor, mut score)| {
        let stats = executor.stats();
        score.add_up();
        score.link_bytes_per_step = stats.link_bytes as f64 / stats.steps.max(1) as f64;
        score
    });
    Ok(scores.collect())
}

/// Whether the greedy answer is `expected` and then ends.
fn answers(executor: &mut CpuExecutor, state: &PromptState, expected: &[TokenId], stop: &[TokenId]) -> CliResult<bool> {
    let request = RequestId(1);
    let first = executor.resume(state, request, expected.len() + 1, SamplingParams::default())?;
    let mut token = first;
    let mut right = true;
    for &wanted in expected {
        if token != wanted {
            right = false;
            break;
        }
        let next = executor.decode(&[DecodeRow { request, token }])?.remove(0);
        token = next.map_err(|error| CliError::Failure(error.to_string()))?;
    }
    executor.release(request);
    Ok(right && stop.contains(&token))
}

/// The scores as tables, one a length.
pub fn render(scores: &[Score], config: &Config) -> String {
    let mut text = format!(
        "exact match of greedy answers; budget {} blocks of {} tokens, {} prompts a task and length\n",
        config.kv.budget_blocks,
        config.kv.block_tokens,
        scores.first().and_then(|s| s.tasks.values().next()).map_or(0, |(_, all)| *all),
    );
    for length in scores.iter().map(|s| s.length).collect::<std::collections::BTreeSet<_>>() {
        let of_length: Vec<&Score> = scores.iter().filter(|s| s.length == length).collect();
        let tasks: Vec<&String> = of_length[0].tasks.keys().collect();
        let mut rows = vec![
            [format!("{length} tokens"), "8 tasks".to_owned(), "all 10".to_owned()]
                .into_iter()
                .chain(tasks.iter().map(|task| (*task).clone()))
                .chain(["KiB/step".to_owned()])
                .collect::<Vec<_>>(),
        ];
        for score in of_length {
            let cell = |(right, all): (usize, usize)| format!("{:.3}", right as f64 / all.max(1) as f64);
            rows.push(
                [score.policy.clone(), cell(score.headline()), cell(score.all())]
                    .into_iter()
                    .chain(tasks.iter().map(|task| cell(score.tasks[*task])))
                    .chain([format!("{:.0}", score.link_bytes_per_step / 1024.0)])
                    .collect(),
            );
        }
        for line in columns(&rows) {
            text.push('\n');
            text.push_str(&line);
        }
        text.push('\n');
    }
    text
}
