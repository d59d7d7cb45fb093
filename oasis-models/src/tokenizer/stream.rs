//! Text of a growing token sequence, without ever showing half a character.

use super::Tokenizer;
use crate::format::error::Result;

/// What an incomplete UTF-8 sequence at the end decodes to.
const INCOMPLETE: char = '\u{FFFD}';
/// When the window of tokens reaches this length ...
const WINDOW: usize = 32;
/// ... it is cut to so many, enough for context and for the longest character.
const CONTEXT: usize = 8;

/// Turns token ids into text one by one; see [`Tokenizer::stream`].
///
/// Characters may span tokens. Text is given out once its last character is complete; [`TextStream::finish`] gives
/// the rest.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    window: Vec<u32>,
    /// Bytes of the window's text that were given out.
    given: usize,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, window: Vec::new(), given: 0 }
    }

    /// Adds a token; returns the text that became certain, often empty in the middle of a character.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window, true)?;
        let out = self.take(certain(&text));
        if self.window.len() >= WINDOW {
            self.window.drain(..self.window.len() - CONTEXT);
            self.given = certain(&self.tokenizer.decode(&self.window, true)?).len();
        }
        Ok(out)
    }

    /// The text still held back: empty, or the replacement character for a sequence that never became complete.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.window, true)?;
        Ok(self.take(&text))
    }

    /// The part of `text` after what was given out, which counts as given out from now on.
    fn take(&mut self, text: &str) -> String {
        let out = text.get(self.given..).unwrap_or_default().to_owned();
        self.given = self.given.max(text.len());
        out
    }
}

/// The text without a last character that may still be completed.
fn certain(text: &str) -> &str {
    text.strip_suffix(INCOMPLETE).unwrap_or(text)
}
