//! Safetensors files: the header through the `safetensors` crate, the data by positioned reads.

use std::path::Path;

use safetensors::Dtype as FileDtype;
use safetensors::tensor::Metadata;

use super::bytes::Bytes;
use super::dtype::Dtype;
use super::error::{CheckpointError, Result};
use super::map::parse_object;
use super::table::{Entry, TensorTable};

/// Name of an unsharded file.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Name of the index of a sharded one.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Largest header, the bound of the `safetensors` crate.
const MAX_HEADER: u64 = 100_000_000;

impl TensorTable {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names, reading headers only.
    pub(crate) fn open_safetensors(folder: &Path) -> Result<Self> {
        let mut table = Self { name: folder.display().to_string(), ..Self::default() };
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        if index.is_file() {
            let index = Bytes::open(&index)?;
            for shard in shard_names(&index.read_text()?, &index.name)? {
                table.add_safetensors(Bytes::open(&folder.join(shard))?)?;
            }
        } else if single.is_file() {
            table.add_safetensors(Bytes::open(&single)?)?;
        } else {
            return Err(no_weights(folder));
        }
        Ok(table)
    }

    /// Adds the tensors of one file.
    pub(crate) fn add_safetensors(&mut self, bytes: Bytes) -> Result<()> {
        let (start, metadata) = read_header(&bytes)?;
        let file = self.files.len();
        for (name, info) in metadata.tensors() {
            let Some(dtype) = dtype(info.dtype) else {
                return Err(CheckpointError::wrong_dtype(
                    format!("{}: tensor {name}", bytes.name),
                    "F32, F16, BF16, I64, I32 or BOOL elements",
                    format!("{:?}", info.dtype),
                    "convert the checkpoint to bf16; quantised safetensors are not supported, GGUF files are",
                ));
            };
            let (from, to) = info.data_offsets;
            let entry = Entry { file, offset: start + from as u64, dtype, shape: info.shape.clone(), bytes: to - from };
            if self.entries.insert(name.clone(), entry).is_some() {
                return Err(CheckpointError::malformed(
                    format!("{}: tensor {name}", bytes.name),
                    "each tensor in one shard only",
                    "it in two shards",
                    "remove files of other models from the folder",
                ));
            }
        }
        self.files.push(bytes);
        Ok(())
    }
}

/// Names of the shards in an index, each once, sorted.
fn shard_names(text: &str, file: &str) -> Result<Vec<String>> {
    let object = parse_object(text, file)?;
    let wrong = |found: String| {
        CheckpointError::malformed(
            file,
            "weight_map, an object from tensor names to files of the same folder",
            found,
            "the index is damaged: fetch it again",
        )
    };
    let map = object.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| wrong("no such object".to_owned()))?;
    let mut shards = Vec::new();
    for value in map.values() {
        let name = value.as_str().ok_or_else(|| wrong(value.to_string()))?;
        if name.is_empty() || name.contains(['/', '\\']) || name == ".." {
            return Err(wrong(format!("the path {name:?}")));
        }
        shards.push(name.to_owned());
    }
    shards.sort_unstable();
    shards.dedup();
    if shards.is_empty() {
        return Err(wrong("an empty one".to_owned()));
    }
    Ok(shards)
}

/// Offset of the data, and the checked header.
fn read_header(bytes: &Bytes) -> Result<(u64, Metadata)> {
    let damaged = "the file is cut short or no safetensors file: fetch it again";
    let mut length = [0; 8];
    bytes.read_exact_at(0, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER.min(bytes.len - 8) {
        return Err(CheckpointError::malformed(
            &bytes.name,
            format!("a header of at most {} bytes", MAX_HEADER.min(bytes.len - 8)),
            format!("a header length of {length}"),
            damaged,
        ));
    }
    let mut header = vec![0; length as usize];
    bytes.read_exact_at(8, &mut header)?;
    // Deserialising also checks that offsets are contiguous and that shapes fill them exactly.
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| CheckpointError::malformed(&bytes.name, "a safetensors header", error.to_string(), damaged))?;
    let end = metadata.tensors().values().map(|info| info.data_offsets.1 as u64).max().unwrap_or(0);
    let data = bytes.len - 8 - length;
    if end > data {
        return Err(CheckpointError::truncated(
            &bytes.name,
            format!("{end} bytes of tensor data"),
            format!("{data}"),
            "the file is cut short: fetch it again",
        ));
    }
    Ok((8 + length, metadata))
}

fn dtype(dtype: FileDtype) -> Option<Dtype> {
    Some(match dtype {
        FileDtype::F32 => Dtype::F32,
        FileDtype::F16 => Dtype::F16,
        FileDtype::BF16 => Dtype::Bf16,
        FileDtype::I64 => Dtype::I64,
        FileDtype::I32 => Dtype::I32,
        FileDtype::BOOL => Dtype::Bool,
        _ => return None,
    })
}

fn no_weights(folder: &Path) -> CheckpointError {
    let pickle = folder.join("pytorch_model.bin").is_file() || folder.join("pytorch_model.bin.index.json").is_file();
    let (found, hint) = if pickle {
        (
            "pytorch_model.bin only",
            "pickled weights can run code and are not read: load the state dict with torch.load(..., weights_only=True) \
             and save it with safetensors.torch.save_file as model.safetensors",
        )
    } else {
        ("neither", "check the path; was the download complete?")
    };
    CheckpointError::not_found(folder.display().to_string(), format!("{SINGLE} or {INDEX}"), found, hint)
}
