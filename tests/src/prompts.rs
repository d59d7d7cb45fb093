//! Prompts of the embedded model, in its tokens.

use crate::references::workspace;
use oasis_core::ids::TokenId;
use oasis_models::checkpoint::{self, Checkpoint};
use oasis_models::tokenizer::ChatMessage;

/// A held-out retrieval task.
#[derive(Debug, Clone)]
pub struct Task {
    /// Kind of question.
    pub kind: String,
    /// Length class in tokens.
    pub length: usize,
    /// The answer, word for word.
    pub answer: String,
    /// The question with its context.
    pub question: String,
}

/// The embedded model's tokenizer, chat template and tasks.
pub struct Prompts {
    checkpoint: Checkpoint,
    tasks: Vec<Task>,
}

/// `count` tokens of the tasks' text, as a model's own tokenizer cuts it.
///
/// # Panics
/// When there is no such model, or not so much text.
pub fn text_for(model: &str, count: usize) -> Vec<TokenId> {
    let opened = checkpoint::open(model).expect("a model");
    let tokenizer = opened.tokenizer().expect("a tokenizer");
    let mut tokens = Vec::new();
    for task in Prompts::new().tasks() {
        if tokens.len() >= count {
            break;
        }
        tokens.extend(tokenizer.encode_prompt(&task.question).expect("tokens").into_iter().map(TokenId));
    }
    tokens.truncate(count);
    assert_eq!(tokens.len(), count, "the tasks have that many tokens");
    tokens
}

impl Default for Prompts {
    fn default() -> Self {
        Self::new()
    }
}

impl Prompts {
    /// Reads the tasks.
    ///
    /// # Panics
    /// When they cannot be read.
    pub fn new() -> Self {
        let text = std::fs::read_to_string(workspace().join("oasis-cli/assets/tasks.jsonl")).unwrap();
        let tasks = text.lines().map(|line| {
            let task: serde_json::Value = serde_json::from_str(line).unwrap();
            let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
            Task {
                kind: text(&task["task"]),
                length: task["length"].as_u64().unwrap() as usize,
                answer: text(&task["answer"]),
                question: text(&task["messages"][0]["content"]),
            }
        });
        Self { tasks: tasks.collect(), checkpoint: checkpoint::open("oasis-tiny").unwrap() }
    }

    /// All tasks.
    pub fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    /// Tokens of plain text.
    ///
    /// # Panics
    /// When the tokenizer refuses it.
    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        self.checkpoint.tokenizer().unwrap().encode_prompt(text).unwrap().into_iter().map(TokenId).collect()
    }

    /// Text of tokens.
    ///
    /// # Panics
    /// When the tokenizer refuses them.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let ids: Vec<u32> = tokens.iter().map(|t| t.0).collect();
        self.checkpoint.tokenizer().unwrap().decode(&ids, true).unwrap()
    }

    /// Tokens of a chat that waits for the answer to `question`.
    ///
    /// # Panics
    /// When the template refuses it.
    pub fn chat(&self, question: &str) -> Vec<TokenId> {
        let template = self.checkpoint.chat_template().expect("the embedded model chats");
        self.encode(&template.render(&[ChatMessage::new("user", question)], true).unwrap())
    }

    /// The token that ends an answer.
    pub fn stop(&self) -> TokenId {
        TokenId(self.checkpoint.spec().eos[0])
    }

    /// A question for `key`, hidden in about `words` words of prose; `which` picks the prose.
    pub fn passkey(&self, key: u32, words: usize, which: usize) -> Vec<TokenId> {
        let prose: Vec<&str> = self.tasks[which % self.tasks.len()].question.split_whitespace().skip(8).collect();
        let (before, after) = prose[..words].split_at(words / 3);
        let (before, after) = (before.join(" "), after.join(" "));
        self.chat(&format!(
            "Read the text and answer the question. {before} The pass key is {key}. Remember it. {key} is the pass key. \
             {after}\n\nWhat is the pass key?"
        ))
    }

    /// `tokens` tokens of prose.
    pub fn prose(&self, tokens: usize, which: usize) -> Vec<TokenId> {
        let mut text = self.encode(&self.tasks[which % self.tasks.len()].question);
        text.truncate(tokens);
        text
    }
}
