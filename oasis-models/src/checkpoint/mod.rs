//! Reading checkpoints: a folder of safetensors, a GGUF file, or a model embedded in the binary.
//!
//! [`open`] reads configuration, tokenizer and tensor tables; [`Checkpoint::load_weights`] reads the weights. Nothing
//! is allocated from a length that was not first checked against the file's size.

mod config;
mod decoder;
mod eagle3;
mod embedded;
mod folder;
mod gguf;
mod load;
mod source;

pub use crate::format::dtype::Dtype;
pub use crate::format::error::{CheckpointError, Problem, Result};
pub use crate::format::table::Provenance;
pub use config::parse_config;
pub use eagle3::{HeadCheckpoint, open_head};
pub use load::{Precision, Progress};
pub use source::{EMBEDDED_HEADS, EMBEDDED_MODELS};

use crate::format::bytes;
use crate::format::gguf::Gguf;
use crate::format::table::TensorTable;
use crate::spec::DecoderSpec;
use crate::tokenizer::{ChatTemplate, Tokenizer};
use crate::weights::DecoderWeights;
use decoder::{Naming, load_decoder};
use load::Loader;
use source::Source;

/// An opened checkpoint: everything but the weights.
#[derive(Debug)]
pub struct Checkpoint {
    spec: DecoderSpec,
    tokenizer: Option<Tokenizer>,
    chat_template: Option<ChatTemplate>,
    table: TensorTable,
    naming: Naming,
    name: String,
}

/// Opens a checkpoint without reading its weights.
///
/// `source` is a folder with config.json and model.safetensors (or model.safetensors.index.json and its shards), a
/// `.safetensors` file in such a folder, a `.gguf` file, or the name of an embedded model ([`EMBEDDED_MODELS`]).
///
/// # Errors
/// [`CheckpointError`]: nothing there, damaged files, a family or setting that is not implemented. A folder without
/// tokenizer.json opens; [`Checkpoint::tokenizer`] then fails.
pub fn open(source: &str) -> Result<Checkpoint> {
    let mut checkpoint = match Source::model(source)? {
        Source::Embedded(folder) => Checkpoint::from_folder(source, &folder)?,
        Source::Folder(folder) => Checkpoint::from_folder(source, &folder)?,
        Source::Gguf(bytes) => Checkpoint::from_gguf(source, bytes)?,
    };
    checkpoint.spec.bos = checkpoint.tokenizer.as_ref().and_then(Tokenizer::bos);
    checkpoint.check_vocabulary()?;
    Ok(checkpoint)
}

impl Checkpoint {
    fn from_folder(name: &str, folder: &folder::Folder) -> Result<Self> {
        let table = folder.weights()?;
        let spec = folder.decoder_spec()?;
        let (tokenizer, chat_template) = folder.tokenizer()?;
        Ok(Self { spec, tokenizer, chat_template, table, naming: Naming::HuggingFace, name: name.to_owned() })
    }

    fn from_gguf(name: &str, bytes: bytes::Bytes) -> Result<Self> {
        let gguf = Gguf::read(bytes)?;
        let spec = gguf.spec()?;
        let tokenizer = Tokenizer::from_gguf(&gguf)?;
        let config = gguf.config();
        let chat_template = match config.opt_str("tokenizer.chat_template")? {
            None => None,
            Some(source) => {
                let text = |key: &str| -> Result<String> {
                    let id = config.token_ids(key, spec.vocab)?.first().copied();
                    Ok(id.and_then(|id| tokenizer.token(id)).unwrap_or_default())
                };
                let (bos, eos) = (text("tokenizer.ggml.bos_token_id")?, text("tokenizer.ggml.eos_token_id")?);
                Some(ChatTemplate::new(source, &gguf.table.name, &bos, &eos)?)
            }
        };
        Ok(Self {
            spec,
            tokenizer: Some(tokenizer),
            chat_template,
            table: gguf.table,
            naming: Naming::Gguf,
            name: name.to_owned(),
        })
    }

    /// Shape and arithmetic.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`] for a folder that has none.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| {
            CheckpointError::tokenizer(
                &self.table.name,
                "a tokenizer.json",
                "none",
                "copy tokenizer.json and tokenizer_config.json of the model into the folder",
            )
        })
    }

    /// The chat template, where the checkpoint has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// Origin, size and element type.
    pub fn provenance(&self) -> Provenance {
        self.table.provenance(&self.name)
    }

    /// Verifies that every tensor is there, has the right shape and type, and that none is left over; reads no data.
    /// Returns the stored bytes that [`Checkpoint::load_weights`] will convert.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`], [`CheckpointError::UnexpectedTensor`], [`CheckpointError::WrongShape`],
    /// [`CheckpointError::WrongDtype`].
    pub fn check_weights(&self) -> Result<u64> {
        let loader = Loader::checking(&self.table);
        load_decoder(&loader, &self.spec, self.naming)?;
        Ok(loader.bytes())
    }

    /// Reads the weights, after the checks of [`Checkpoint::check_weights`]; `progress` hears of every tensor.
    ///
    /// # Errors
    /// As [`Checkpoint::check_weights`], and [`CheckpointError::Io`] or [`CheckpointError::Truncated`] for a file that
    /// changed meanwhile.
    pub fn load_weights(&self, precision: Precision, progress: &mut dyn FnMut(Progress)) -> Result<DecoderWeights> {
        let total = self.check_weights()?;
        load_decoder(&Loader::reading(&self.table, precision, total, progress), &self.spec, self.naming)
    }

    /// A token id past the embedding would have no row.
    fn check_vocabulary(&self) -> Result<()> {
        let vocab = self.spec.vocab;
        match self.tokenizer.as_ref().and_then(Tokenizer::max_id).filter(|&id| id as usize >= vocab) {
            None => Ok(()),
            Some(id) => Err(CheckpointError::tokenizer(
                format!("{}: largest token id", self.table.name),
                format!("below vocab_size {vocab}"),
                id.to_string(),
                "the tokenizer and the weights belong to different models",
            )),
        }
    }
}

impl TensorTable {
    fn provenance(&self, name: &str) -> Provenance {
        let mut by_dtype = std::collections::BTreeMap::new();
        for entry in self.entries.values() {
            *by_dtype.entry(entry.dtype.name()).or_insert(0) += entry.bytes;
        }
        Provenance {
            name: name.to_owned(),
            file_bytes: self.files.iter().map(|file| file.len).sum(),
            dtype: by_dtype.into_iter().max_by_key(|&(_, bytes)| bytes).map_or("none", |(name, _)| name),
        }
    }
}
