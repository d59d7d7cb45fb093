//! The prompt: an argument, a file, standard input, or a chat made of them.

use crate::error::{CliError, CliResult};
use crate::tokens::ModelText;
use clap::Args;
use oasis_core::ids::TokenId;
use std::io::{IsTerminal, Read};
use std::path::PathBuf;

/// Where a prompt comes from.
#[derive(Debug, Default, Args)]
pub struct PromptArgs {
    /// Prompt, after the text of --file where there is one; `-` reads standard input, as does none at all in a pipe
    prompt: Option<String>,
    /// Read the prompt, or its beginning, from a file
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Put the prompt into the model's chat template
    #[arg(long)]
    chat: bool,
    /// System message of the chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
}

impl PromptArgs {
    /// Reads the prompt's text; `None` when none was named and standard input has none.
    ///
    /// # Errors
    /// When the named text is empty, or cannot be read as UTF-8.
    pub fn read(&self) -> CliResult<Option<String>> {
        let mut stdin = std::io::stdin();
        let piped = !stdin.is_terminal();
        self.read_from(&mut stdin, piped)
    }

    fn read_from(&self, stdin: &mut dyn Read, piped: bool) -> CliResult<Option<String>> {
        let mut parts = Vec::new();
        if let Some(path) = &self.file {
            parts.push(text(&format!("--file {}", path.display()), std::fs::read(path))?);
        }
        let all_of = |stdin: &mut dyn Read| {
            let mut bytes = Vec::new();
            stdin.read_to_end(&mut bytes).map(|_| bytes)
        };
        match self.prompt.as_deref() {
            Some("-") => parts.push(text("standard input", all_of(stdin))?),
            Some(prompt) => parts.push(prompt.to_owned()),
            None if parts.is_empty() && piped => parts.push(text("standard input", all_of(stdin))?),
            None => (),
        }
        let named = self.prompt.is_some() || self.file.is_some();
        let prompt = parts.join("\n\n");
        match prompt.trim().is_empty() {
            false => Ok(Some(prompt)),
            true if named => Err(Self::missing()),
            true => Ok(None),
        }
    }

    /// The error of a prompt without text.
    pub fn missing() -> CliError {
        CliError::input(
            "the prompt: expected some text, found none",
            "oasis run \"Once upon a time\", oasis run --file FILE, or text on standard input",
        )
    }

    /// Tokens of the prompt, within the chat template where that was asked for.
    ///
    /// # Errors
    /// When the model has no template, or the text has no tokens.
    pub fn encode(&self, text: &ModelText<'_>, prompt: &str) -> CliResult<Vec<TokenId>> {
        match self.chat {
            true => text.encode_chat(self.system.as_deref(), prompt),
            false => text.encode(prompt),
        }
    }
}

/// UTF-8 text without its last line end.
fn text(source: &str, bytes: std::io::Result<Vec<u8>>) -> CliResult<String> {
    let wrong =
        |problem: String| CliError::input(format!("{source}: expected {problem}"), "a prompt is plain text in UTF-8");
    let bytes = bytes.map_err(|error| wrong(format!("readable text, found: {error}")))?;
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        wrong(format!("UTF-8 text, found other bytes at offset {at}"))
    })?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(prompt: Option<&str>, file: Option<PathBuf>) -> PromptArgs {
        PromptArgs { prompt: prompt.map(str::to_owned), file, ..PromptArgs::default() }
    }

    fn read(args: &PromptArgs, stdin: &str, piped: bool) -> CliResult<Option<String>> {
        args.read_from(&mut stdin.as_bytes(), piped)
    }

    #[test]
    fn an_argument_is_taken_before_a_pipe() {
        assert_eq!(read(&args(Some("hello"), None), "piped", true).unwrap().unwrap(), "hello");
    }

    #[test]
    fn a_pipe_or_a_dash_reads_standard_input() {
        assert_eq!(read(&args(None, None), "piped\n", true).unwrap().unwrap(), "piped");
        assert_eq!(read(&args(Some("-"), None), "typed\r\n", false).unwrap().unwrap(), "typed");
    }

    #[test]
    fn a_file_comes_before_the_question() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("document.txt");
        std::fs::write(&path, "A document.\n").unwrap();
        assert_eq!(read(&args(Some("Why?"), Some(path.clone())), "", true).unwrap().unwrap(), "A document.\n\nWhy?");
        assert_eq!(read(&args(None, Some(path)), "ignored", true).unwrap().unwrap(), "A document.");
    }

    #[test]
    fn an_empty_prompt_is_wrong_input_but_none_at_all_is_not() {
        for (stdin, piped) in [("", false), ("", true), ("\n", true)] {
            assert_eq!(read(&args(None, None), stdin, piped).unwrap(), None);
        }
        for (given, stdin, piped) in [(Some("-"), "", true), (Some(""), "", false), (Some(" \n"), "", true)] {
            let error = read(&args(given, None), stdin, piped).unwrap_err();
            assert!(matches!(&error, CliError::Input(text) if text.contains("found none")), "{error:?}");
        }
    }

    #[test]
    fn unreadable_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let missing = read(&args(None, Some(folder.path().join("none.txt"))), "", false).unwrap_err();
        assert!(missing.text().unwrap().contains("none.txt"));
        let path = folder.path().join("binary");
        std::fs::write(&path, b"ok\xff").unwrap();
        let binary = read(&args(None, Some(path)), "", false).unwrap_err();
        assert!(binary.text().unwrap().contains("offset 2\n  hint: "), "{binary:?}");
    }
}
