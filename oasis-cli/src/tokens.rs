//! Between text and tokens, for one model.

use crate::error::{CliError, CliResult};
use oasis_core::ids::TokenId;
use oasis_models::checkpoint::Checkpoint;
use oasis_models::tokenizer::{ChatMessage, TextStream, Tokenizer};

/// Text of tokens that arrive one by one.
pub trait Decode {
    /// Adds a token; gives the text that has become certain, often none.
    ///
    /// # Errors
    /// When the tokenizer refuses the token.
    fn push(&mut self, token: TokenId) -> CliResult<String>;

    /// Gives the text still held back.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    fn finish(&mut self) -> CliResult<String>;
}

/// The tokenizer and chat template of an opened model.
pub struct ModelText<'a> {
    checkpoint: &'a Checkpoint,
    tokenizer: &'a Tokenizer,
}

impl<'a> ModelText<'a> {
    /// Of `checkpoint`.
    ///
    /// # Errors
    /// When it has no tokenizer.
    pub fn new(checkpoint: &'a Checkpoint) -> CliResult<Self> {
        Ok(Self { checkpoint, tokenizer: checkpoint.tokenizer()? })
    }

    /// Tokens of plain text.
    ///
    /// # Errors
    /// When the text has no tokens in this vocabulary.
    pub fn encode(&self, text: &str) -> CliResult<Vec<TokenId>> {
        Ok(self.tokenizer.encode_prompt(text)?.into_iter().map(TokenId).collect())
    }

    /// Tokens of a chat that waits for the assistant's answer.
    ///
    /// # Errors
    /// When the model has no chat template, or the template refuses the messages.
    pub fn encode_chat(&self, system: Option<&str>, user: &str) -> CliResult<Vec<TokenId>> {
        let template = self.checkpoint.chat_template().ok_or_else(|| {
            let name = self.checkpoint.provenance().name;
            CliError::input(
                format!("--chat: expected a model with a chat template, found none in {name}"),
                "leave --chat out, or choose an instruction-tuned model",
            )
        })?;
        let system = system.map(|text| ChatMessage::new("system", text));
        let messages: Vec<_> = system.into_iter().chain([ChatMessage::new("user", user)]).collect();
        self.encode(&template.render(&messages, true)?)
    }

    /// Tokens that end a text.
    pub fn stop_tokens(&self) -> Vec<TokenId> {
        self.checkpoint.spec().eos.iter().copied().map(TokenId).collect()
    }

    /// A decoder for one answer.
    pub fn decoder(&self) -> ModelDecoder<'a> {
        ModelDecoder(Some(self.tokenizer.stream()))
    }
}

/// Decodes one answer.
pub struct ModelDecoder<'a>(Option<TextStream<'a>>);

impl Decode for ModelDecoder<'_> {
    fn push(&mut self, token: TokenId) -> CliResult<String> {
        Ok(self.0.as_mut().map_or(Ok(String::new()), |stream| stream.push(token.0))?)
    }

    fn finish(&mut self) -> CliResult<String> {
        Ok(self.0.take().map_or(Ok(String::new()), TextStream::finish)?)
    }
}
