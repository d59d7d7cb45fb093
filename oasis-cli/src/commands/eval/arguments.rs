//! Arguments that measurements share: which policies, along which text.

use crate::args::count;
use crate::error::{CliError, CliResult};
use crate::eval::setting::Contender;
use crate::eval::tasks::{self, Task};
use crate::eval::window::{Window, warn_of_fewer};
use crate::text::grouped;
use crate::tokens::ModelText;
use clap::Args;
use oasis_core::ids::TokenId;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Which policies are compared.
#[derive(Debug, Args)]
pub struct ContenderArgs {
    /// Measure the configuration as it is, without the usual policies
    #[arg(long)]
    configured: bool,
    /// A further policy, such as selector.fetch_ratio=0.1,predictor.kind=last-query; may be repeated
    #[arg(long, value_name = "KEY=VALUE,...")]
    with: Vec<String>,
}

/// Contexts and what follows them.
#[derive(Debug, Args)]
pub struct WindowArgs {
    /// Text to decode along [default: the embedded tasks and their answers]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Tokens before the first measured step; of the embedded tasks the length class
    #[arg(long, value_name = "TOKENS", value_parser = count(1))]
    context: Option<usize>,
    /// Steps of one window of the text, at least 2: the first sees the full KV with every policy
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count(2), requires = "file")]
    steps: usize,
    /// Windows of the text, or tasks
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = count(1))]
    windows: usize,
}

impl ContenderArgs {
    /// The policies.
    pub fn contenders(&self) -> Vec<Contender> {
        Contender::choose(self.configured, &self.with)
    }
}

impl WindowArgs {
    /// The text, with the argument that names it.
    pub fn file(&self) -> Option<(&'static str, PathBuf)> {
        self.file.clone().map(|file| ("--file", file))
    }

    /// The windows, none longer than `limit` tokens.
    ///
    /// # Errors
    /// When the text cannot be read, or has no window of that length.
    pub fn read(&self, text: &ModelText<'_>, limit: usize) -> CliResult<Vec<Window>> {
        let windows = match &self.file {
            Some(path) => self.of_text(path, text)?,
            None => self.of_tasks(text)?,
        };
        if let Some(longest) = windows.iter().map(|w| w.context.len() + w.forced.len()).max().filter(|l| *l > limit) {
            return Err(CliError::input(
                format!("the contexts: expected at most {limit} tokens with the steps, found {longest}"),
                "lower --context or --steps",
            ));
        }
        Ok(windows)
    }

    fn of_text(&self, path: &PathBuf, text: &ModelText<'_>) -> CliResult<Vec<Window>> {
        let prose = std::fs::read_to_string(path).map_err(|error| {
            CliError::input(
                format!("--file {}: expected readable UTF-8 text, found: {error}", path.display()),
                "without --file the embedded tasks are decoded",
            )
        })?;
        Window::cut(&text.encode(&prose)?, self.context.unwrap_or(4096), self.steps, self.windows)
    }

    /// One window a task: its prompt, then its answer.
    fn of_tasks(&self, text: &ModelText<'_>) -> CliResult<Vec<Window>> {
        let tasks = tasks::read(None)?;
        let asked: Vec<usize> = self.context.into_iter().collect();
        let lengths = tasks.iter().map(|task| task.length);
        let lengths = choose("--context", &asked, lengths, "--file takes a text of any length")?;
        let length = *lengths.last().expect("there are tasks");
        // In turn over the kinds of task, as the file has several of each kind in a row.
        let mut of_length: Vec<&Task> = tasks.iter().filter(|task| task.length == length).collect();
        of_length.sort_by_key(|task| task.id.rsplit('-').next().and_then(|n| n.parse::<usize>().ok()));
        warn_of_fewer(of_length.len(), self.windows, |tasks| {
            format!("there are {tasks} tasks of {} tokens", grouped(length as u64))
        });
        let end: Vec<TokenId> = text.stop_tokens().into_iter().take(1).collect();
        of_length
            .into_iter()
            .take(self.windows)
            .map(|task| {
                let context = text.encode_chat(None, task.question())?;
                let forced = text.encode(&task.answer)?.into_iter().chain(end.iter().copied()).collect();
                Ok(Window { context, forced })
            })
            .collect()
    }
}

/// The asked ones among those there are, or all of them; `hint` says what to do about one that is not there.
///
/// # Errors
/// When one of them is not there.
pub fn choose<T: Clone + Ord + std::fmt::Display>(
    argument: &str,
    asked: &[T],
    there: impl Iterator<Item = T>,
    hint: &str,
) -> CliResult<Vec<T>> {
    let there: BTreeSet<T> = there.collect();
    if let Some(missing) = asked.iter().find(|value| !there.contains(value)) {
        let known: Vec<String> = there.iter().map(ToString::to_string).collect();
        let problem = format!("{argument}: expected one of {}, found {missing}", known.join(", "));
        return Err(CliError::input(problem, hint));
    }
    Ok(if asked.is_empty() { there.into_iter().collect() } else { asked.to_vec() })
}
