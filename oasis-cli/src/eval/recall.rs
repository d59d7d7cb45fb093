//! Recall: exact match of greedy answers, policy by policy.

use crate::error::{CliError, CliResult};
use crate::eval::device::{Device, Progress, Prompt};
use crate::eval::running::{Running, Traffic};
use crate::eval::setting::Contender;
use crate::eval::statistics::wilson;
use crate::eval::tasks::Task;
use crate::text::columns;
use crate::tokens::ModelText;
use oasis_core::config::Config;
use oasis_core::ids::TokenId;
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

/// Runs all contenders over prompts, in any order of lengths; `progress` hears of each answer. Gives a score for each
/// contender at each length, the shorter length first.
///
/// # Errors
/// When a contender's settings are wrong, a prompt is too long, or a request fails.
pub fn measure(
    device: &Device<'_>,
    contenders: &[Contender],
    tasks: &[&Task],
    progress: &mut Progress<'_>,
) -> CliResult<Vec<Score>> {
    let setting = device.setting();
    let (stop, limit) = (setting.text.stop_tokens(), setting.max_context());
    let questions =
        tasks.iter().map(|task| Question::new(task, &setting.text, limit)).collect::<CliResult<Vec<_>>>()?;
    let prompts: Vec<Prompt<'_>> = (questions.iter())
        .map(|question| Prompt { tokens: &question.prompt, new_tokens: question.answer.len() + 1 })
        .collect();
    let mut scores: BTreeMap<(usize, usize), (Score, Traffic)> = BTreeMap::new();
    device.run(&contenders.iter().collect::<Vec<_>>(), &prompts, progress, &mut |turn| {
        let task = tasks[turn.prompt];
        let (right, traffic) = answers(turn.running, &questions[turn.prompt].answer, &stop)?;
        let (score, sum) = scores.entry((task.length, turn.contender)).or_default();
        let (hits, all) = score.tasks.entry(task.task.clone()).or_default();
        *hits += usize::from(right);
        *all += 1;
        *sum += traffic;
        Ok(())
    })?;
    let scores = scores.into_iter().map(|((length, contender), (mut score, traffic))| {
        contenders[contender].name().clone_into(&mut score.policy);
        score.length = length;
        score.add_up();
        score.link_bytes_per_step = traffic.bytes_per_step();
        score
    });
    Ok(scores.collect())
}

/// A task in tokens.
struct Question {
    prompt: Vec<TokenId>,
    answer: Vec<TokenId>,
}

impl Question {
    /// Refuses a task that is longer than `limit` tokens with its answer.
    fn new(task: &Task, text: &ModelText<'_>, limit: usize) -> CliResult<Self> {
        let (prompt, answer) = (text.encode_chat(None, task.question())?, text.encode(&task.answer)?);
        let length = prompt.len() + answer.len() + 1;
        if length > limit {
            return Err(CliError::input(
                format!("task {}: expected a context within {limit} tokens, found {length} with its answer", task.id),
                "choose shorter tasks with --length",
            ));
        }
        Ok(Self { prompt, answer })
    }
}

/// Whether the greedy answer is `expected` and then ends.
fn answers(mut running: Running<'_>, expected: &[TokenId], stop: &[TokenId]) -> CliResult<(bool, Traffic)> {
    let mut token = running.first();
    for &wanted in expected {
        if token != wanted {
            return Ok((false, running.end()));
        }
        token = running.step(token)?;
    }
    Ok((stop.contains(&token), running.end()))
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
