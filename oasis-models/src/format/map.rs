//! Typed access to the keys of a config.json, with errors that name the key and the file.

use serde_json::{Map, Value};

use crate::format::error::{CheckpointError, Result};

/// A JSON object and the name of the file it came from.
#[derive(Debug, Clone)]
pub(crate) struct ConfigMap<'a> {
    map: &'a Map<String, Value>,
    /// Name for messages.
    pub file: &'a str,
    prefix: String,
}

/// Parses the text of a JSON file whose root must be an object.
pub(crate) fn parse_object(text: &str, file: &str) -> Result<Map<String, Value>> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(CheckpointError::malformed(
            file,
            "a JSON object",
            kind(&other),
            "this is not the file its name promises",
        )),
        Err(error) => Err(CheckpointError::malformed(
            file,
            "valid JSON",
            error.to_string(),
            "the file is damaged: fetch it again",
        )),
    }
}

impl<'a> ConfigMap<'a> {
    pub fn new(map: &'a Map<String, Value>, file: &'a str) -> Self {
        Self { map, file, prefix: String::new() }
    }

    /// The value of a key; absent and `null` are the same.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Name of a key for messages: `config.json: rope_scaling.factor`.
    pub fn what(&self, key: &str) -> String {
        format!("{}: {}{key}", self.file, self.prefix)
    }

    pub fn object(&self, key: &str) -> Result<Option<ConfigMap<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self { map, file: self.file, prefix: format!("{}{key}.", self.prefix) }))
            }
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
        number.map(Some).ok_or_else(|| self.wrong(key, "a whole number of at least 0", value))
    }

    /// A required count within `1..=max`.
    pub fn count(&self, key: &str, max: usize) -> Result<usize> {
        let value = self.opt_usize(key)?.ok_or_else(|| self.missing(key, "a whole number"))?;
        self.bounded(key, value, max)
    }

    /// An optional count within `1..=max`.
    pub fn opt_count(&self, key: &str, max: usize) -> Result<Option<usize>> {
        self.opt_usize(key)?.map(|value| self.bounded(key, value, max)).transpose()
    }

    fn bounded(&self, key: &str, value: usize, max: usize) -> Result<usize> {
        if (1..=max).contains(&value) {
            return Ok(value);
        }
        Err(CheckpointError::invalid_config(
            self.what(key),
            format!("a number from 1 to {max}"),
            value.to_string(),
            "the config does not describe a model that can be run",
        ))
    }

    /// An optional finite number.
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().filter(|number| number.is_finite()).map(Some).ok_or_else(|| self.wrong(key, "a number", value))
    }

    /// An optional number above zero that also is so as f32.
    pub fn opt_positive(&self, key: &str) -> Result<Option<f64>> {
        let Some(number) = self.opt_f64(key)? else { return Ok(None) };
        if number as f32 > 0.0 && (number as f32).is_finite() {
            return Ok(Some(number));
        }
        Err(CheckpointError::invalid_config(
            self.what(key),
            "a number above 0",
            number.to_string(),
            "the config does not describe a model that can be run",
        ))
    }

    /// A required number above zero.
    pub fn positive(&self, key: &str) -> Result<f64> {
        self.opt_positive(key)?.ok_or_else(|| self.missing(key, "a number above 0"))
    }

    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, "true or false", value))
    }

    pub fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string", value))
    }

    /// A list of whole numbers; a bare number is a list of one.
    pub fn usize_list(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let one = |value: &Value| value.as_u64().and_then(|number| usize::try_from(number).ok());
        let list = match value {
            Value::Array(items) => items.iter().map(one).collect::<Option<Vec<_>>>(),
            other => one(other).map(|number| vec![number]),
        };
        list.map(Some).ok_or_else(|| self.wrong(key, "a whole number or a list of them", value))
    }

    /// Token ids below `vocab`; a bare number is a list of one, absent is none.
    pub fn token_ids(&self, key: &str, vocab: usize) -> Result<Vec<u32>> {
        let ids = self.usize_list(key)?.unwrap_or_default();
        ids.into_iter()
            .map(|id| match u32::try_from(id) {
                Ok(token) if id < vocab => Ok(token),
                _ => Err(CheckpointError::invalid_config(
                    self.what(key),
                    format!("token ids below vocab_size {vocab}"),
                    id.to_string(),
                    "config.json and generation_config.json must belong to the same model",
                )),
            })
            .collect()
    }

    /// The error for a key that must be there.
    pub fn missing(&self, key: &str, expected: &str) -> CheckpointError {
        CheckpointError::invalid_config(
            self.what(key),
            expected,
            "nothing",
            "the config must be complete: save it again with the library that made it",
        )
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> CheckpointError {
        CheckpointError::invalid_config(self.what(key), expected, kind(found), "the config is damaged or hand-edited")
    }

    /// The error for a key whose value asks for something that is not implemented.
    pub fn refuse(&self, key: &str, expected: &str, hint: &str) -> CheckpointError {
        let found = self.map.get(key).map_or_else(|| "nothing".to_owned(), kind);
        CheckpointError::unsupported(self.what(key), expected, found, hint)
    }
}

/// A value for messages, shortened.
fn kind(value: &Value) -> String {
    let mut text = match value {
        Value::Object(_) => return "an object".to_owned(),
        other => other.to_string(),
    };
    if text.len() > 80 {
        let cut = (0..=77).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(cut);
        text.push_str("...");
    }
    text
}
