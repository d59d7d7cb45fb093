//! Retrieval tasks: long prompts, short answers that stand somewhere in them. Held-out ones of the embedded model come with
//! the program; others can be generated.

mod draw;
pub mod generate;
pub mod kinds;
mod layout;
pub mod prose;

#[cfg(test)]
mod tests;

use crate::error::{CliError, CliResult};
use crate::tokens::ModelText;
use oasis_core::ids::TokenId;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Tasks that come with the program: 40 prompts each of about 4,096, 8,192 and 16,384 tokens.
const EMBEDDED: &str = include_str!("../../../assets/tasks.jsonl");

/// Most tokens of an answer that may use its own words.
const FREE_ANSWER: usize = 64;

/// What a file of tasks has.
const FIELDS: &str = "a line is a task: id, task, length, answer and messages [{role, content}] as a JSON object";

/// One prompt with its answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Name of the prompt.
    pub id: String,
    /// Kind of question.
    pub task: String,
    /// Length class in tokens.
    pub length: usize,
    /// Tokens of the prompt for the model that it was written for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<usize>,
    /// The answer, word for word.
    pub answer: String,
    /// Texts that a right answer contains, in whatever words; none where it must be [`answer`](Self::answer).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contains: Vec<String>,
    /// Share of the context before each fact that is asked for, 0 to 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depths: Vec<f64>,
    /// The question with its context.
    pub messages: Vec<Message>,
}

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Task {
    /// The user's message.
    pub fn question(&self) -> &str {
        self.messages.first().map_or("", |message| &message.content)
    }

    /// Tokens of the prompt.
    ///
    /// # Errors
    /// When the model has no chat template.
    pub fn prompt(&self, text: &ModelText<'_>) -> CliResult<Vec<TokenId>> {
        text.encode_chat(None, self.question())
    }

    /// Most tokens that are decoded for an answer, its end included.
    ///
    /// # Errors
    /// When the answer has no tokens in the model's vocabulary.
    pub fn most_tokens(&self, text: &ModelText<'_>) -> CliResult<usize> {
        let answer = text.encode(&self.answer)?.len() + 1;
        Ok(if self.contains.is_empty() { answer } else { answer.max(FREE_ANSWER) })
    }
}

/// Reads tasks from a file of one JSON object a line, or the embedded ones.
///
/// # Errors
/// Names the file and the line that is no task, or a file without tasks.
pub fn read(file: Option<&Path>) -> CliResult<Vec<Task>> {
    let (name, text) = match file {
        None => ("the embedded tasks".to_owned(), EMBEDDED.to_owned()),
        Some(path) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|error| {
                CliError::Input(format!("{name}: expected a readable file of tasks, found: {error}"))
            })?;
            (name, text)
        }
    };
    let tasks = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(|(number, line)| {
        serde_json::from_str(line).map_err(|error| {
            CliError::input(
                format!("{name}, line {}: expected a task as a JSON object, found: {error}", number + 1),
                FIELDS,
            )
        })
    });
    let tasks: Vec<Task> = tasks.collect::<CliResult<_>>()?;
    if tasks.is_empty() {
        return Err(CliError::input(format!("{name}: expected at least one task, found none"), FIELDS));
    }
    Ok(tasks)
}
