//! From a [`TensorTable`] to the matrices of [`crate::weights`]: names, fusing, row order, precision, progress.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;

use half::bf16;
use half::slice::HalfFloatSliceExt;

use crate::format::dtype::Dtype;
use crate::format::error::{CheckpointError, Result};
use crate::format::table::{Entry, TensorTable};
use crate::weights::{Matrix, MatrixData};

/// In which precision matrices are kept. Vectors (norms, biases) are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// As stored: bf16 stays bf16, f32 stays f32, f16 widens to f32; GGUF-quantised types are rounded to bf16 (to
    /// nearest, ties to even). A fused matrix of several types takes the wider one.
    #[default]
    Auto,
    /// Everything widened to f32.
    F32,
    /// Everything rounded to bf16.
    Bf16,
}

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Stored bytes converted so far.
    pub done: u64,
    /// Stored bytes that will be converted in all.
    pub total: u64,
}

/// Row order of a stored projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As the executors want it.
    Plain,
    /// Rotary pairs adjacent within each head of that width (GGUF, arch llama); to be brought to rotate-half order.
    Interleaved {
        /// Rows of a head.
        head_dim: usize,
    },
}

impl RowOrder {
    /// Where a stored row belongs.
    fn place(self, row: usize) -> usize {
        match self {
            Self::Plain => row,
            Self::Interleaved { head_dim } => {
                let within = row % head_dim;
                row - within + within % 2 * (head_dim / 2) + within / 2
            }
        }
    }
}

/// Rows of a fused matrix that one stored tensor gives.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Name in the file.
    pub name: String,
    /// Rows it must have.
    pub rows: usize,
    /// Their order in the file.
    pub order: RowOrder,
    /// The stored tensor is the `index`-th of `count` stacked `[rows][cols]` ones.
    pub slice: Option<(usize, usize)>,
}

impl Part {
    pub fn new(name: impl Into<String>, rows: usize) -> Self {
        Self { name: name.into(), rows, order: RowOrder::Plain, slice: None }
    }
}

/// Reads tensors by name. In checking mode nothing is read and matrices come back empty, but every name, shape and
/// element type is verified and the bytes are counted.
pub(crate) struct Loader<'a> {
    pub table: &'a TensorTable,
    precision: Precision,
    reading: Option<Reading<'a>>,
    used: RefCell<HashSet<String>>,
    bytes: Cell<u64>,
}

struct Reading<'a> {
    total: u64,
    progress: RefCell<&'a mut dyn FnMut(Progress)>,
}

impl<'a> Loader<'a> {
    /// A loader that only checks.
    pub fn checking(table: &'a TensorTable) -> Self {
        Self { table, precision: Precision::Auto, reading: None, used: RefCell::default(), bytes: Cell::new(0) }
    }

    /// A loader that reads; `total` is [`Loader::bytes`] of a check before.
    pub fn reading(
        table: &'a TensorTable,
        precision: Precision,
        total: u64,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        let reading = Some(Reading { total, progress: RefCell::new(progress) });
        Self { table, precision, reading, used: RefCell::default(), bytes: Cell::new(0) }
    }

    /// Stored bytes of everything asked for so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// The file has a tensor of that name.
    pub fn has(&self, name: &str) -> bool {
        self.table.entries.contains_key(name)
    }

    /// Counts a tensor as accounted for without reading it.
    pub fn ignore(&self, name: &str) {
        self.used.borrow_mut().insert(name.to_owned());
    }

    /// Refuses tensors that nobody asked for: they would change the result and are not computed.
    pub fn refuse_leftovers(&self) -> Result<()> {
        let used = self.used.borrow();
        let harmless = |name: &str| name.ends_with("rotary_emb.inv_freq") || name == "rope_freqs.weight";
        let extra = self.table.entries.keys().filter(|name| !used.contains(*name) && !harmless(name)).min();
        match extra {
            None => Ok(()),
            Some(name) => Err(CheckpointError::unexpected_tensor(
                format!("{}: tensor {name}", self.table.name),
                "only tensors that the config accounts for",
                "this one, which would be ignored",
                "the model has a part that is not implemented, or the config describes another model",
            )),
        }
    }

    /// A matrix `[sum of rows][cols]` of the parts, one under the other.
    pub fn matrix(&self, parts: &[Part], cols: usize) -> Result<Matrix> {
        let mut narrow = true;
        for part in parts {
            let shape = match part.slice {
                None => vec![part.rows, cols],
                Some((_, count)) => vec![count, part.rows, cols],
            };
            narrow &= self.table.weights(&part.name, &shape)?.dtype.fits_bf16();
        }
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        let narrow = match self.precision {
            Precision::Auto => narrow,
            Precision::F32 => false,
            Precision::Bf16 => true,
        };
        // The parts' shapes were found in the files, whose sizes bound the allocation.
        let elements = if self.reading.is_some() { rows * cols } else { 0 };
        let mut data =
            if narrow { MatrixData::Bf16(vec![bf16::ZERO; elements]) } else { MatrixData::F32(vec![0.0; elements]) };
        let mut first = 0;
        for part in parts {
            let entry = self.entry(part)?;
            if self.reading.is_some() {
                self.read_part(part, &entry, cols, first * cols, &mut data)?;
            }
            self.account(&part.name, entry.bytes);
            first += part.rows;
        }
        Ok(Matrix { rows, cols, data })
    }

    /// Where a part's bytes lie.
    fn entry(&self, part: &Part) -> Result<Entry> {
        let mut entry = self.table.find(&part.name)?.clone();
        if let Some((index, count)) = part.slice {
            entry.bytes /= count;
            entry.offset += (index * entry.bytes) as u64;
            entry.shape.remove(0);
        }
        Ok(entry)
    }

    /// Reads the rows of a part into a fused matrix, from its element `first` on.
    fn read_part(&self, part: &Part, entry: &Entry, cols: usize, first: usize, data: &mut MatrixData) -> Result<()> {
        let at = |row| first + part.order.place(row) * cols;
        match data {
            MatrixData::Bf16(data) if entry.dtype == Dtype::Bf16 && part.order == RowOrder::Plain => {
                self.table.read_bf16(entry, &mut data[first..first + part.rows * cols])
            }
            MatrixData::Bf16(data) => self.table.read_rows(entry, part.rows, &mut |row, values| {
                data[at(row)..at(row) + cols].convert_from_f32_slice(values);
            }),
            MatrixData::F32(data) => self.table.read_rows(entry, part.rows, &mut |row, values| {
                data[at(row)..at(row) + cols].copy_from_slice(values);
            }),
        }
    }

    /// A matrix of one tensor.
    pub fn single(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        self.matrix(&[Part::new(name, rows)], cols)
    }

    /// A vector of one tensor `[len]`, in f32 (in checking mode empty).
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let entry = self.table.weights(name, &[len])?;
        let mut out = Vec::new();
        if self.reading.is_some() {
            self.table.read_rows(entry, 1, &mut |_, row| out.extend_from_slice(row))?;
        }
        self.account(name, entry.bytes);
        Ok(out)
    }

    /// One vector of several parts, as [`Loader::matrix`] of one column.
    pub fn joined_vector(&self, parts: &[Part]) -> Result<Vec<f32>> {
        let mut out = Vec::new();
        for part in parts {
            let values = self.vector(&part.name, part.rows)?;
            let first = out.len();
            out.resize(first + values.len(), 0.0);
            for (row, value) in values.into_iter().enumerate() {
                out[first + part.order.place(row)] = value;
            }
        }
        Ok(out)
    }

    /// An integer vector `[len]` (in checking mode empty).
    pub fn integers(&self, name: &str, len: usize) -> Result<Vec<i64>> {
        let entry = self.table.find(name)?;
        if entry.shape != [len] {
            return Err(CheckpointError::wrong_shape(
                self.table.what(name, entry),
                format!("shape [{len}]"),
                format!("{:?}", entry.shape),
                "the config and the weights belong to different models",
            ));
        }
        let out = if self.reading.is_some() { self.table.read_integers(name, entry)? } else { Vec::new() };
        self.account(name, entry.bytes);
        Ok(out)
    }

    fn account(&self, name: &str, bytes: usize) {
        self.used.borrow_mut().insert(name.to_owned());
        self.bytes.set(self.bytes.get() + bytes as u64);
        if let Some(reading) = &self.reading {
            let mut report = reading.progress.borrow_mut();
            report(Progress { done: self.bytes.get(), total: reading.total });
        }
    }
}
