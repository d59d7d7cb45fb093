//! Tokenizers (Hugging Face `tokenizer.json` and the BPE of GGUF files) and chat templates.

mod chat;
mod gguf;
mod json;
mod stream;
mod strftime;

pub use chat::{ChatMessage, ChatTemplate};
pub use stream::TextStream;

pub(crate) use json::token_text;

use crate::format::error::{CheckpointError, Result};

/// A tokenizer of either origin.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    file: String,
    bos: Option<u32>,
}

impl Tokenizer {
    /// Token ids of `text`; the texts of special tokens become those tokens, nothing is added.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`] when the text has no tokens in this vocabulary.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding =
            self.inner.encode_fast(text, false).map_err(|error| self.failure("text it can encode", &*error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// As [`Tokenizer::encode`], with the begin-of-sequence token in front where the checkpoint asks for one and the
    /// text (a rendered chat template, say) does not begin with it already.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        if let Some(bos) = self.bos.filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Text of token ids; bytes that are no UTF-8 become U+FFFD. With `skip_special`, special tokens give no text.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`] when the decoder refuses them. Unknown ids are skipped.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(|error| self.failure("ids it can decode", &*error))
    }

    /// A decoder for ids that arrive one by one; special tokens give no text.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// Id of a token by its text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Text of a token as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The token to put before a prompt, where the checkpoint asks for one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Largest token id.
    pub(crate) fn max_id(&self) -> Option<u32> {
        self.inner.get_vocab(true).into_values().max()
    }

    fn failure(&self, expected: &str, error: &(dyn std::error::Error + Send + Sync)) -> CheckpointError {
        CheckpointError::tokenizer(&self.file, expected, error.to_string(), "is this the tokenizer of the model?")
    }
}
