//! Hugging Face's tokenizer.json.

use serde_json::{Map, Value};

use super::Tokenizer;
use crate::format::error::{CheckpointError, Result};
use crate::format::map::{ConfigMap, parse_object};

impl Tokenizer {
    /// Builds the tokenizer of a tokenizer.json; `file` names it in messages, `settings` is tokenizer_config.json.
    ///
    /// A begin-of-sequence token is put before prompts where `add_bos_token` says so, or, where it says nothing,
    /// where the post-processor adds it.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`] for a file that is damaged or needs something the `tokenizers` crate lacks.
    pub(crate) fn from_json(text: &str, file: &str, settings: Option<&ConfigMap<'_>>) -> Result<Self> {
        let object = parse_object(text, file)?;
        check_merges(&object, file)?;
        let damaged = |error: &dyn std::fmt::Display| {
            let hint = "is the file complete, and of a fast (Rust) tokenizer?";
            CheckpointError::tokenizer(file, "a tokenizer.json", error.to_string(), hint)
        };
        let mut inner = tokenizers::Tokenizer::from_bytes(text).map_err(|error| damaged(&error))?;
        inner.with_truncation(None).map_err(|error| damaged(&error))?;
        inner.with_padding(None);
        let mut tokenizer = Self { inner, file: file.to_owned(), bos: None };
        tokenizer.bos = tokenizer.find_bos(settings)?;
        Ok(tokenizer)
    }

    fn find_bos(&self, settings: Option<&ConfigMap<'_>>) -> Result<Option<u32>> {
        let wanted = settings.map(|settings| settings.opt_bool("add_bos_token")).transpose()?.flatten();
        let named = settings.and_then(|settings| token_text(settings, "bos_token"));
        match wanted {
            Some(false) => Ok(None),
            Some(true) => match named.as_deref().and_then(|text| self.token_id(text)) {
                Some(id) => Ok(Some(id)),
                None => Err(CheckpointError::tokenizer(
                    settings.map_or_else(String::new, |settings| settings.what("bos_token")),
                    "a token of the vocabulary, as add_bos_token is true",
                    format!("{named:?}"),
                    "tokenizer.json and tokenizer_config.json must belong to the same model",
                )),
            },
            None => {
                let encode = |special| self.inner.encode_fast("a", special).map(|encoding| encoding.get_ids().to_vec());
                let failure = |error: &(dyn std::error::Error + Send + Sync)| self.failure("text it can encode", error);
                let plain = encode(false).map_err(|error| failure(&*error))?;
                let processed = encode(true).map_err(|error| failure(&*error))?;
                Ok(processed
                    .first()
                    .copied()
                    .filter(|first| processed.len() > plain.len() && Some(first) != plain.first()))
            }
        }
    }
}

/// Text of a special token in tokenizer_config.json: a string, or an object with `content`.
pub(crate) fn token_text(settings: &ConfigMap<'_>, key: &str) -> Option<String> {
    let value = settings.get(key)?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

/// Checks what the `tokenizers` crate takes for granted: every merge gives a token of the vocabulary.
fn check_merges(object: &Map<String, Value>, file: &str) -> Result<()> {
    let Some(model) = object.get("model").and_then(Value::as_object) else { return Ok(()) };
    let (Some(Value::Object(vocab)), Some(Value::Array(merges))) = (model.get("vocab"), model.get("merges")) else {
        return Ok(());
    };
    let damaged = |found: String| {
        CheckpointError::tokenizer(
            format!("{file}: model.merges"),
            "pairs of tokens whose union is a token",
            found,
            "the file is damaged: fetch it again",
        )
    };
    let prefix = model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or_default();
    for merge in merges {
        let pair = match merge {
            Value::String(text) => text.split_once(' '),
            Value::Array(pair) => match pair.as_slice() {
                [Value::String(a), Value::String(b)] => Some((a.as_str(), b.as_str())),
                _ => None,
            },
            _ => None,
        };
        let (a, b) = pair.ok_or_else(|| damaged(merge.to_string()))?;
        let joined = b.strip_prefix(prefix).map(|rest| format!("{a}{rest}"));
        if !joined.is_some_and(|joined| vocab.contains_key(&joined)) {
            return Err(damaged(merge.to_string()));
        }
    }
    Ok(())
}
