//! Recall: right greedy answers, policy by policy.

use crate::error::{CliError, CliResult};
use crate::eval::device::{Device, Progress, Prompt};
use crate::eval::running::{Running, Traffic};
use crate::eval::setting::Contender;
use crate::eval::statistics::wilson;
use crate::eval::tasks::Task;
use crate::eval::tasks::kinds::mentions;
use crate::text::columns;
use crate::tokens::{Decode, ModelText};
use oasis_core::config::Config;
use oasis_core::ids::TokenId;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

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

    /// Kinds of tasks, and how many of them are hard.
    fn kinds(&self) -> (usize, usize) {
        (self.tasks.len(), self.tasks.keys().filter(|task| HARD.contains(&task.as_str())).count())
    }

    /// Whether the headline sums several kinds and leaves out others.
    fn has_headline(&self) -> bool {
        let (kinds, hard) = self.kinds();
        hard > 0 && kinds - hard > 1
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
        .map(|question| Prompt { tokens: &question.prompt, new_tokens: question.most_tokens })
        .collect();
    let mut scores: BTreeMap<(usize, usize), (Score, Traffic)> = BTreeMap::new();
    device.run(&contenders.iter().collect::<Vec<_>>(), &prompts, progress, &mut |turn| {
        let task = tasks[turn.prompt];
        let (right, traffic) = questions[turn.prompt].is_answered(turn.running, &stop, &setting.text)?;
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
struct Question<'a> {
    prompt: Vec<TokenId>,
    most_tokens: usize,
    right: Right<'a>,
}

/// Which answers are right.
enum Right<'a> {
    /// These tokens and then the end.
    Exact(Vec<TokenId>),
    /// Those with all of these texts, in upper or lower case.
    Containing(&'a [String]),
}

impl<'a> Question<'a> {
    /// Refuses a task that is longer than `limit` tokens with its answer.
    fn new(task: &'a Task, text: &ModelText<'_>, limit: usize) -> CliResult<Self> {
        let (prompt, most_tokens) = (task.prompt(text)?, task.most_tokens(text)?);
        let length = prompt.len() + most_tokens;
        if length > limit {
            return Err(CliError::input(
                format!("task {}: expected a context within {limit} tokens, found {length} with its answer", task.id),
                "choose shorter tasks with --length",
            ));
        }
        let right = match task.contains.as_slice() {
            [] => Right::Exact(text.encode(&task.answer)?),
            texts => Right::Containing(texts),
        };
        Ok(Self { prompt, most_tokens, right })
    }

    /// Whether the greedy answer is right.
    fn is_answered(
        &self,
        mut running: Running<'_>,
        stop: &[TokenId],
        text: &ModelText<'_>,
    ) -> CliResult<(bool, Traffic)> {
        let mut token = running.first();
        match &self.right {
            Right::Exact(answer) => {
                for &wanted in answer {
                    if token != wanted {
                        return Ok((false, running.end()));
                    }
                    token = running.step(token)?;
                }
                Ok((stop.contains(&token), running.end()))
            }
            Right::Containing(texts) => {
                let (mut decoder, mut answer) = (text.decoder(), String::new());
                for left in (0..self.most_tokens).rev() {
                    if stop.contains(&token) {
                        break;
                    }
                    answer.push_str(&decoder.push(token)?);
                    if left > 0 {
                        token = running.step(token)?;
                    }
                }
                answer.push_str(&decoder.finish()?);
                tracing::debug!(answer, "free answer");
                Ok((contains_all(&answer, texts), running.end()))
            }
        }
    }
}

/// Whether all of `texts` stand in an answer, in upper or lower case.
fn contains_all(answer: &str, texts: &[String]) -> bool {
    let answer = answer.to_lowercase();
    texts.iter().all(|text| mentions(&answer, &text.to_lowercase()))
}

/// The scores as tables, one a length. `tasks` are those that were asked.
pub fn render(scores: &[Score], tasks: &[&Task], config: &Config) -> String {
    let counts = scores.iter().flat_map(|score| score.tasks.values().map(|(_, all)| *all));
    let prompts = match (counts.clone().min(), counts.max().unwrap_or(0)) {
        (Some(least), most) if least < most => format!("{least} to {most} prompts"),
        (_, 1) => "1 prompt".to_owned(),
        (_, most) => format!("{most} prompts"),
    };
    let measure = match tasks.iter().filter(|task| !task.contains.is_empty()).count() {
        0 => "exact match of greedy answers",
        all if all == tasks.len() => "greedy answers that contain the values",
        _ => "exact match of greedy answers, or of the values that they are to contain",
    };
    let kv = &config.kv;
    let mut text = format!(
        "{measure}; budget {} blocks of {} tokens, {prompts} a task and length\n",
        kv.budget_blocks, kv.block_tokens
    );
    for length in scores.iter().map(|s| s.length).collect::<BTreeSet<_>>() {
        let of_length: Vec<&Score> = scores.iter().filter(|s| s.length == length).collect();
        let mut rows = vec![[vec![format!("{length} tokens")], heads(of_length[0])].concat()];
        rows.extend(of_length.into_iter().map(|score| [vec![score.policy.clone()], cells(score)].concat()));
        for line in columns(&rows) {
            text.push('\n');
            text.push_str(&line);
        }
        text.push('\n');
    }
    text
}

/// Heads of the columns of a score. Sums that repeat another column are left out.
fn heads(score: &Score) -> Vec<String> {
    let (kinds, hard) = score.kinds();
    let sums = [(score.has_headline(), format!("{} tasks", kinds - hard)), (kinds > 1, format!("all {kinds}"))];
    let sums = sums.into_iter().filter_map(|(is_shown, head)| is_shown.then_some(head));
    sums.chain(score.tasks.keys().cloned()).chain(["KiB/step".to_owned()]).collect()
}

/// Its cells.
fn cells(score: &Score) -> Vec<String> {
    let sums = [(score.has_headline(), score.headline()), (score.tasks.len() > 1, score.all())];
    let sums = sums.into_iter().filter_map(|(is_shown, sum)| is_shown.then_some(sum));
    let shares = sums.chain(score.tasks.values().copied());
    let shares = shares.map(|(right, all)| format!("{:.3}", right as f64 / all.max(1) as f64));
    shares.chain([format!("{:.0}", score.link_bytes_per_step / 1024.0)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::GlobalArgs;
    use crate::settings::resolve;

    fn table(kinds: &[&str]) -> String {
        let tasks = kinds.iter().map(|kind| ((*kind).to_owned(), (1, 4))).collect();
        let mut score = Score { policy: "dense".to_owned(), length: 100, tasks, ..Score::default() };
        score.add_up();
        let resolved = resolve(&GlobalArgs::default(), Vec::new()).unwrap();
        render(&[score], &[], &resolved.config)
    }

    #[test]
    fn sums_have_columns_where_they_sum_several() {
        let heads = |kinds: &[&str]| {
            let table = table(kinds);
            let rows: Vec<&str> = table.lines().skip(2).collect();
            assert_eq!(rows[0].split("  ").filter(|head| !head.is_empty()).count(), rows[1].split_whitespace().count());
            rows[0].split("  ").filter(|head| !head.is_empty()).map(|head| head.trim().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(heads(&["kv"]), ["100 tokens", "kv", "KiB/step"]);
        assert_eq!(heads(&["hop2"]), ["100 tokens", "hop2", "KiB/step"]);
        assert_eq!(heads(&["kv", "var"]), ["100 tokens", "all 2", "kv", "var", "KiB/step"]);
        assert_eq!(heads(&["hop2", "kv_dense"]), ["100 tokens", "all 2", "hop2", "kv_dense", "KiB/step"]);
        assert_eq!(heads(&["hop2", "kv", "var"]), ["100 tokens", "2 tasks", "all 3", "hop2", "kv", "var", "KiB/step"]);
        assert_eq!(heads(&["hop2", "kv"]), ["100 tokens", "all 2", "hop2", "kv", "KiB/step"]);
    }

    #[test]
    fn an_answer_contains_whole_values() {
        let values = ["48213".to_owned(), "Olga Winter".to_owned()];
        assert!(contains_all("It is 48213, kept by OLGA WINTER.", &values));
        assert!(!contains_all("It is 482135, kept by Olga Winter.", &values));
        assert!(!contains_all("It is 48213.", &values));
    }
}
