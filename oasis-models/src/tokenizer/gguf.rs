//! The tokenizer inside a GGUF file, rebuilt as byte-level BPE.
//!
//! Pre-tokenizers after llama.cpp `src/llama-vocab.cpp` (`tokenizer.ggml.pre`).

use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::Tokenizer;
use crate::format::error::{CheckpointError, Result};
use crate::format::gguf::Gguf;

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";

/// Token types of `tokenizer.ggml.token_type`.
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// How text is cut before merging.
struct Preset {
    steps: Vec<PreTokenizerWrapper>,
    /// Qwen's normalisation.
    nfc: bool,
    /// Llama 3's habits: whole words that are tokens need no merges; a begin-of-sequence token unless told otherwise.
    llama3: bool,
}

impl Tokenizer {
    /// Builds the tokenizer of a GGUF file.
    ///
    /// # Errors
    /// [`CheckpointError::Unsupported`] for a tokenizer other than byte-level BPE (`gpt2`) or a pre-tokenizer that is
    /// not known, [`CheckpointError::Tokenizer`] for missing or damaged lists.
    pub(crate) fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let config = gguf.config();
        if config.opt_str("tokenizer.ggml.model")? != Some("gpt2") {
            return Err(config.refuse(
                "tokenizer.ggml.model",
                "gpt2 (byte-level BPE)",
                "SentencePiece tokenizers of GGUF files are not implemented: use the model's safetensors folder",
            ));
        }
        let pre = config.opt_str("tokenizer.ggml.pre")?.unwrap_or("default");
        let preset = preset(pre).map_err(|error| tokenizer_error(config.what("tokenizer.ggml.pre"), &*error))?;
        let Some(preset) = preset else {
            let hint = "text would be cut wrongly: use the model's safetensors folder";
            return Err(config.refuse("tokenizer.ggml.pre", "smollm, qwen2, llama-bpe, gpt-2 or default", hint));
        };
        let tokens = strings(gguf, "tokenizer.ggml.tokens")?;
        let merges = merges(gguf, &tokens)?;
        let failure = |error: tokenizers::Error| tokenizer_error(config.what("tokenizer.ggml.tokens"), &*error);
        let vocab: Vocab = tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id)).collect();
        if vocab.len() != tokens.len() {
            return Err(damaged(gguf, "tokenizer.ggml.tokens", "each token once", "a token twice"));
        }
        let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(preset.llama3);
        let mut inner = tokenizers::Tokenizer::new(model.build().map_err(failure)?);
        if preset.nfc {
            inner.with_normalizer(Some(NFC)).map_err(failure)?;
        }
        inner.with_pre_tokenizer(Some(Sequence::new(preset.steps)));
        inner.with_decoder(Some(ByteLevel::default()));
        let (special, plain) = added_tokens(gguf, &tokens)?;
        inner.add_special_tokens(special).map_err(failure)?;
        inner.add_tokens(plain).map_err(failure)?;
        let mut tokenizer = Self { inner, file: gguf.table.name.clone(), bos: None };
        if config.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(preset.llama3) {
            tokenizer.bos = config.token_ids("tokenizer.ggml.bos_token_id", tokens.len())?.first().copied();
        }
        Ok(tokenizer)
    }
}

fn preset(pre: &str) -> tokenizers::Result<Option<Preset>> {
    let split = |pattern: &str| -> tokenizers::Result<PreTokenizerWrapper> {
        let pattern = SplitPattern::Regex(pattern.to_owned());
        Ok(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into())
    };
    let bytes = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, true, use_regex));
    let plain = |steps| Preset { steps, nfc: false, llama3: false };
    Ok(Some(match pre {
        "smollm" => plain(vec![Digits::new(true).into(), bytes(true)]),
        "gpt-2" => plain(vec![bytes(true)]),
        "default" => {
            let cuts = [PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];
            let mut steps = cuts.into_iter().map(split).collect::<tokenizers::Result<Vec<_>>>()?;
            steps.push(bytes(false));
            plain(steps)
        }
        "qwen2" => Preset { nfc: true, ..plain(vec![split(QWEN2)?, bytes(false)]) },
        "llama-bpe" | "llama3" | "llama-v3" => Preset { llama3: true, ..plain(vec![split(LLAMA3)?, bytes(false)]) },
        _ => return Ok(None),
    }))
}

fn merges(gguf: &Gguf, tokens: &[&str]) -> Result<Vec<(String, String)>> {
    let key = "tokenizer.ggml.merges";
    let known: std::collections::HashSet<&str> = tokens.iter().copied().collect();
    let mut joined = String::new();
    let pairs = strings(gguf, key)?.into_iter().map(|merge| {
        // The separator is the first space after the first character: byte-level tokens hold no spaces themselves.
        let (a, b) = merge.split_once(' ')?;
        joined.clear();
        joined.extend([a, b]);
        (known.contains(a) && known.contains(b) && known.contains(joined.as_str()))
            .then(|| (a.to_owned(), b.to_owned()))
    });
    let pairs: Option<Vec<_>> = pairs.collect();
    pairs.ok_or_else(|| damaged(gguf, key, "pairs of tokens whose union is a token", "something else"))
}

/// Special tokens, and those that are only never split.
fn added_tokens(gguf: &Gguf, tokens: &[&str]) -> Result<(Vec<AddedToken>, Vec<AddedToken>)> {
    let key = "tokenizer.ggml.token_type";
    let Some(array) = gguf.arrays.get(key) else { return Ok(Default::default()) };
    let types = array.integers().filter(|types| types.len() == tokens.len());
    let types = types.ok_or_else(|| damaged(gguf, key, "one 32-bit integer a token", "something else"))?;
    let of = |wanted: i32, special: bool| {
        let chosen = tokens.iter().zip(&types).filter(|(token, kind)| **kind == wanted && !token.is_empty());
        chosen.map(|(token, _)| AddedToken::from(*token, special).normalized(false)).collect()
    };
    Ok((of(CONTROL, true), of(USER_DEFINED, false)))
}

fn strings<'a>(gguf: &'a Gguf, key: &str) -> Result<Vec<&'a str>> {
    let strings = gguf.arrays.get(key).and_then(|array| array.strings());
    strings.ok_or_else(|| damaged(gguf, key, "a list of UTF-8 strings", "nothing of the kind"))
}

fn damaged(gguf: &Gguf, key: &str, expected: &str, found: &str) -> CheckpointError {
    CheckpointError::tokenizer(
        format!("{}: {key}", gguf.table.name),
        expected,
        found,
        "the file is damaged or was made without a tokenizer: convert the model again",
    )
}

fn tokenizer_error(what: String, error: &(dyn std::error::Error + Send + Sync)) -> CheckpointError {
    CheckpointError::tokenizer(what, "a byte-level BPE vocabulary", error.to_string(), "convert the model again")
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::preset;

    /// How a preset cuts a text; spaces are written as the byte-level alphabet writes them.
    fn cuts(pre: &str, text: &str) -> Vec<String> {
        let mut pieces = PreTokenizedString::from(text);
        for step in preset(pre).unwrap().unwrap().steps {
            step.pre_tokenize(&mut pieces).unwrap();
        }
        let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        splits.into_iter().map(|(text, ..)| text.to_owned()).collect()
    }

    #[test]
    fn digits_are_cut_as_each_family_does() {
        assert_eq!(cuts("smollm", "a 1234"), ["a", "Ġ", "1", "2", "3", "4"]);
        assert_eq!(cuts("qwen2", "a 1234"), ["a", "Ġ", "1", "2", "3", "4"]);
        assert_eq!(cuts("llama-bpe", "a 1234"), ["a", "Ġ", "123", "4"]);
        assert_eq!(cuts("gpt-2", "a 1234"), ["a", "Ġ1234"]);
        assert_eq!(cuts("default", "a 1234"), ["a", "Ġ", "123", "4"]);
    }

    #[test]
    fn contractions_words_and_line_breaks() {
        assert_eq!(cuts("llama-bpe", "I'LL go.\n\n x"), ["I", "'LL", "Ġgo", ".ĊĊ", "Ġx"]);
        assert_eq!(cuts("qwen2", "don't (yes)"), ["don", "'t", "Ġ(", "yes", ")"]);
        assert_eq!(cuts("smollm", "I'LL go"), ["I", "'", "LL", "Ġgo"]);
        assert_eq!(cuts("smollm", "two  \n x"), ["two", "ĠĠĊ", "Ġx"]);
        assert_eq!(cuts("default", "a+b"), ["a", "+", "b"]);
        assert!(preset("tekken").unwrap().is_none());
    }
}
