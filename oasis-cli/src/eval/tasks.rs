//! Held-out retrieval tasks of the embedded model: long prompts, short answers that stand somewhere in them.

use crate::error::{CliError, CliResult};
use serde::Deserialize;
use std::path::Path;

/// Tasks that come with the program: 40 prompts each of about 4,096, 8,192 and 16,384 tokens.
const EMBEDDED: &str = include_str!("../../assets/tasks.jsonl");

/// One prompt with its answer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Task {
    /// Name of the prompt.
    pub id: String,
    /// Kind of question.
    pub task: String,
    /// Length class in tokens.
    pub length: usize,
    /// The answer, word for word.
    pub answer: String,
    /// The question with its context.
    pub messages: Vec<Message>,
}

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Deserialize)]
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
}

/// Reads tasks from a file of one JSON object a line, or the embedded ones.
///
/// # Errors
/// Names the file and the line that is no task.
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
                "a task has id, task, length, answer and messages [{role, content}]",
            )
        })
    });
    tasks.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_tasks_are_complete() {
        let tasks = read(None).unwrap();
        assert_eq!(tasks.len(), 120);
        for length in [4096, 8192, 16384] {
            assert_eq!(tasks.iter().filter(|task| task.length == length).count(), 40);
        }
        assert!(tasks.iter().all(|task| !task.question().is_empty() && !task.answer.is_empty()));
    }

    #[test]
    fn a_line_that_is_no_task_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "\n{\"id\": 3}\n").unwrap();
        let error = read(Some(file.path())).unwrap_err();
        assert!(error.text().unwrap().contains("line 2"), "{:?}", error.text());
    }
}
