//! What a name or a path stands for.

use std::path::{Path, PathBuf};

use super::embedded;
use super::folder::Folder;
use crate::format::bytes::Bytes;
use crate::format::error::{CheckpointError, Result};

/// Names of the models inside the binary.
pub const EMBEDDED_MODELS: [&str; 1] = ["oasis-tiny"];
/// Names of the draft heads inside the binary.
pub const EMBEDDED_HEADS: [&str; 2] = ["oasis-tiny-eagle3", "smollm2-135m-eagle3"];

/// A place to read a checkpoint from.
pub(super) enum Source {
    Embedded(Folder),
    Folder(Folder),
    Gguf(Bytes),
}

impl Source {
    /// The place of a model.
    pub fn model(source: &str) -> Result<Self> {
        if source == EMBEDDED_MODELS[0] {
            return Ok(Self::Embedded(Folder::embedded(source, &embedded::OASIS_TINY)));
        }
        Self::path(source, &EMBEDDED_MODELS)
    }

    /// The place of a draft head.
    pub fn head(source: &str) -> Result<Self> {
        match EMBEDDED_HEADS.iter().position(|name| *name == source) {
            Some(0) => Ok(Self::Embedded(Folder::embedded(source, &embedded::OASIS_TINY_EAGLE3))),
            Some(_) => Ok(Self::Embedded(Folder::embedded(source, &embedded::SMOLLM2_EAGLE3))),
            None => Self::path(source, &EMBEDDED_HEADS),
        }
    }

    fn path(source: &str, names: &[&str]) -> Result<Self> {
        let path = Path::new(source);
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        if path.is_dir() {
            return Ok(Self::Folder(Folder::on_disk(path.to_owned())));
        }
        if path.is_file() && extension.eq_ignore_ascii_case("gguf") {
            return Bytes::open(path).map(Self::Gguf);
        }
        if path.is_file() && extension == "safetensors" {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            return Ok(Self::Folder(Folder::on_disk(folder.map_or_else(|| PathBuf::from("."), Path::to_owned))));
        }
        let found = if path.exists() { "a file of another kind" } else { "nothing" };
        Err(CheckpointError::not_found(
            source,
            format!("a checkpoint folder, a .gguf file, or one of the names {}", names.join(", ")),
            found,
            "check the path; relative paths start at the current directory",
        ))
    }
}
