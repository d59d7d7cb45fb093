//! What a machine and a model were measured to do: the input of the model of the time to the first token.

use crate::error::{CliError, CliResult};
use serde::Deserialize;
use std::path::Path;

/// Measured values, as their file has them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// What was measured, for the heading.
    pub about: String,
    /// Shape of the cache.
    pub kv: KvShape,
    /// Times of whole prompts, by length; at least one.
    pub prefill: Vec<PrefillTime>,
    /// Sizes of the union of all KV heads' first choices, by length; at least one.
    pub union: Vec<UnionSize>,
    /// Milliseconds that a transfer takes before its first byte, on any link.
    #[serde(default)]
    pub latency_ms: f64,
}

/// Shape of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: u64,
    /// KV heads of a layer.
    pub kv_heads: u64,
    /// Elements of a key.
    pub head_dim: u64,
    /// Bytes of an element.
    pub element_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Rows of a block's summary; 0 where summaries do not cross.
    pub summary_rows: u64,
    /// Layers of the draft head whose KV crosses.
    pub draft_layers: u64,
}

/// Time to read one prompt.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillTime {
    /// Its length.
    pub tokens: u64,
    /// Seconds.
    pub seconds: f64,
}

/// Size of a union.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnionSize {
    /// Length of the prompt.
    pub tokens: u64,
    /// Blocks of a layer, mean of all layers.
    pub blocks: f64,
}

/// What `oasis` has measured.
const DEFAULT: &str = include_str!("../../assets/ttft.toml");

impl Measured {
    /// The values of a file, TOML or, where its name ends in `.json`, JSON; without one those of this repository.
    ///
    /// # Errors
    /// When the file cannot be read or is not such a file, or its values are impossible.
    pub fn read(path: Option<&Path>) -> CliResult<Self> {
        let Some(path) = path else { return Self::parse("the built-in values", DEFAULT, false) };
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| CliError::Input(format!("{name}: expected a readable file, found: {error}")))?;
        Self::parse(&name, &text, path.extension().is_some_and(|extension| extension == "json"))
    }

    fn parse(name: &str, text: &str, is_json: bool) -> CliResult<Self> {
        let wrong = |problem: String| {
            CliError::input(
                format!("{name}: expected measured values, found: {problem}"),
                "docs/experiments/ttft/paper.toml is such a file",
            )
        };
        let measured: Self = match is_json {
            true => serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?,
            false => toml::from_str(text).map_err(|error| wrong(error.to_string()))?,
        };
        match measured.problem() {
            None => Ok(measured),
            Some(problem) => Err(wrong(problem)),
        }
    }

    fn problem(&self) -> Option<String> {
        let Self { kv, prefill, union, latency_ms, .. } = self;
        let KvShape { layers, kv_heads, head_dim, element_bytes, block_tokens, .. } = *kv;
        let sizes = [layers, kv_heads, head_dim, element_bytes, block_tokens];
        let is_positive = |value: f64| value.is_finite() && value > 0.0;
        if sizes.iter().any(|size| !(1..=1 << 20).contains(size)) {
            return Some(format!("a cache of {sizes:?} layers, KV heads, elements, bytes and tokens of a block"));
        }
        if let Some(time) = prefill.iter().find(|time| time.tokens == 0 || !is_positive(time.seconds)) {
            return Some(format!("{} tokens in {} s", time.tokens, time.seconds));
        }
        if let Some(size) = union.iter().find(|size| size.tokens == 0 || !is_positive(size.blocks)) {
            return Some(format!("a union of {} blocks at {} tokens", size.blocks, size.tokens));
        }
        if !prefill.is_sorted_by(|a, b| a.tokens < b.tokens) || !union.is_sorted_by(|a, b| a.tokens < b.tokens) {
            return Some("lengths of prompts that do not ascend".to_owned());
        }
        if prefill.is_empty() || union.is_empty() {
            return Some("no `prefill` or no `union`".to_owned());
        }
        (!latency_ms.is_finite() || *latency_ms < 0.0).then(|| format!("latency_ms = {latency_ms}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_both_kinds_are_read_and_wrong_ones_are_named() {
        let default = Measured::read(None).unwrap();
        assert_eq!(default.kv.layers * default.kv.kv_heads * default.kv.head_dim, 36 * 1024);
        let paper = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/experiments/ttft/paper.toml");
        assert_eq!(Measured::read(Some(Path::new(paper))).unwrap().union.len(), 2);

        let json = r#"{"about": "a", "latency_ms": 2,
            "kv": {"layers": 1, "kv_heads": 1, "head_dim": 1, "element_bytes": 1, "block_tokens": 1, "summary_rows": 0,
                   "draft_layers": 0},
            "prefill": [{"tokens": 1, "seconds": 1}], "union": [{"tokens": 1, "blocks": 1}]}"#;
        assert!((Measured::parse("f", json, true).unwrap().latency_ms - 2.0).abs() < 1e-9);
        for (from, to, found) in [
            ("\"layers\": 1", "\"layers\": 0", "[0, 1, 1, 1, 1]"),
            ("\"seconds\": 1", "\"seconds\": -1", "1 tokens in -1 s"),
            ("\"blocks\": 1", "\"blocks\": 0", "a union of 0 blocks"),
            ("[{\"tokens\": 1, \"seconds\": 1}]", "[]", "no `prefill`"),
            ("\"latency_ms\": 2", "\"latency_ms\": -2", "latency_ms = -2"),
            ("\"latency_ms\"", "\"latency\"", "unknown field"),
            (
                "{\"tokens\": 1, \"blocks\": 1}",
                "{\"tokens\": 1, \"blocks\": 1}, {\"tokens\": 1, \"blocks\": 1}",
                "ascend",
            ),
        ] {
            assert!(json.contains(from));
            let error = Measured::parse("f", &json.replace(from, to), true).unwrap_err();
            let text = error.text().unwrap();
            assert!(text.starts_with("f: expected measured values") && text.contains(found), "{text}");
        }
    }
}
