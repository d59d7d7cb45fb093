//! The tensors of a checkpoint, whatever its format: where each lies, and reads that convert in small pieces.

use std::collections::HashMap;

use half::bf16;

use super::bytes::Bytes;
use super::dtype::Dtype;
use super::error::{CheckpointError, Result};

/// Bytes of one positioned read, at least one row: what a read needs beside the tensor itself.
const CHUNK_BYTES: usize = 4 << 20;

/// Where a checkpoint came from, for logs and result files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provenance {
    /// The name or path it was opened by.
    pub name: String,
    /// Size of all weight files, bytes.
    pub file_bytes: u64,
    /// Element type that most of the stored bytes have: "BF16", "Q4_1".
    pub dtype: &'static str,
}

/// Where a tensor lies and what it holds.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Index of its file in [`TensorTable::files`].
    pub file: usize,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape, slowest dimension first.
    pub shape: Vec<usize>,
    /// Stored bytes, known to lie within the file.
    pub bytes: usize,
}

/// All tensors of a checkpoint by name, and the files they lie in.
#[derive(Debug, Default)]
pub(crate) struct TensorTable {
    /// Files of the checkpoint.
    pub files: Vec<Bytes>,
    /// Tensors by the name the file gives them.
    pub entries: HashMap<String, Entry>,
    /// How messages about missing tensors name the checkpoint.
    pub name: String,
}

/// A consumer of rows as they are decoded: row index, values.
pub(crate) type RowSink<'a> = dyn FnMut(usize, &[f32]) + 'a;

impl TensorTable {
    /// The tensor of that name.
    pub fn find(&self, name: &str) -> Result<&Entry> {
        self.entries.get(name).ok_or_else(|| {
            CheckpointError::missing_tensor(
                format!("{}: tensor {name}", self.name),
                "the tensor",
                format!("{} other tensors", self.entries.len()),
                "the weights are incomplete, or the config describes another model",
            )
        })
    }

    /// The tensor of that name, checked to be floats of that shape.
    pub fn weights(&self, name: &str, shape: &[usize]) -> Result<&Entry> {
        let entry = self.find(name)?;
        if entry.shape != shape {
            return Err(CheckpointError::wrong_shape(
                self.what(name, entry),
                format!("shape {shape:?}"),
                format!("{:?}", entry.shape),
                "the config and the weights belong to different models",
            ));
        }
        if !entry.dtype.is_float() {
            return Err(self.dtype_error(name, entry, "floating-point or GGUF-quantised elements"));
        }
        Ok(entry)
    }

    /// The error for a tensor whose element type cannot serve.
    pub fn dtype_error(&self, name: &str, entry: &Entry, expected: &str) -> CheckpointError {
        CheckpointError::wrong_dtype(
            self.what(name, entry),
            expected,
            entry.dtype.name(),
            "convert the checkpoint to bf16, f16 or f32",
        )
    }

    /// Name of a tensor for messages: `model.safetensors: tensor lm_head.weight`.
    pub fn what(&self, name: &str, entry: &Entry) -> String {
        let file = self.files.get(entry.file).map_or(self.name.as_str(), |file| file.name.as_str());
        format!("{file}: tensor {name}")
    }

    /// Reads a float tensor as `rows` rows, in order, and hands each to `sink`.
    ///
    /// The tensor's elements must divide into `rows` rows of whole blocks.
    pub fn read_rows(&self, entry: &Entry, rows: usize, sink: &mut RowSink<'_>) -> Result<()> {
        let row_bytes = entry.bytes / rows;
        let row_len = entry.shape.iter().product::<usize>() / rows;
        let chunk = (CHUNK_BYTES / row_bytes.max(1)).clamp(1, rows);
        let mut raw = vec![0; chunk * row_bytes];
        let mut values = vec![0.0; row_len];
        for first in (0..rows).step_by(chunk) {
            let raw = &mut raw[..chunk.min(rows - first) * row_bytes];
            self.read_raw(entry, first * row_bytes, raw)?;
            for (row, raw) in raw.chunks_exact(row_bytes).enumerate() {
                entry.dtype.decode(raw, &mut values);
                sink(first + row, &values);
            }
        }
        Ok(())
    }

    /// Reads a whole bf16 tensor as it is.
    pub fn read_bf16(&self, entry: &Entry, out: &mut [bf16]) -> Result<()> {
        self.read_raw(entry, 0, bytemuck::cast_slice_mut(out))?;
        if cfg!(target_endian = "big") {
            out.iter_mut().for_each(|value| *value = bf16::from_bits(value.to_bits().swap_bytes()));
        }
        Ok(())
    }

    /// Reads an integer tensor.
    pub fn read_integers(&self, name: &str, entry: &Entry) -> Result<Vec<i64>> {
        let mut raw = vec![0; entry.bytes];
        self.read_raw(entry, 0, &mut raw)?;
        match entry.dtype {
            Dtype::I64 => Ok(raw.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()),
            Dtype::I32 => Ok(raw.as_chunks().0.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes))).collect()),
            _ => Err(self.dtype_error(name, entry, "integers, I64 or I32")),
        }
    }

    fn read_raw(&self, entry: &Entry, start: usize, out: &mut [u8]) -> Result<()> {
        self.files[entry.file].read_exact_at(entry.offset + start as u64, out)
    }
}
