//! Header, metadata and tensor table of a GGUF file.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::cursor::Cursor;
use super::value::{Array, MetaValue, read_value};
use crate::format::bytes::Bytes;
use crate::format::dtype::Dtype;
use crate::format::error::{CheckpointError, Result};
use crate::format::map::ConfigMap;
use crate::format::table::{Entry, TensorTable};

const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;
/// Smallest sizes of a metadata pair and of a row of the tensor table, in bytes.
const MIN_KEY_BYTES: u64 = 13;
const MIN_TENSOR_BYTES: u64 = 32;

/// A GGUF file whose header was read and checked.
#[derive(Debug)]
pub(crate) struct Gguf {
    /// Scalars and strings of the metadata.
    pub meta: Map<String, Value>,
    /// Arrays of the metadata.
    pub arrays: HashMap<String, Array>,
    /// Tensors; shapes are slowest dimension first.
    pub table: TensorTable,
}

impl Gguf {
    /// Reads everything but the tensor data.
    pub fn read(bytes: Bytes) -> Result<Self> {
        let name = bytes.name.clone();
        let mut cursor = Cursor::new(&bytes);
        let (tensors, keys) = read_counts(&mut cursor, &name)?;
        let (meta, arrays) = read_metadata(&mut cursor, &name, keys)?;
        let alignment = alignment(&ConfigMap::new(&meta, &name))?;
        let mut rows = Vec::new();
        for _ in 0..tensors {
            rows.push(read_tensor(&mut cursor, &name, alignment)?);
        }
        let base = cursor.pos.next_multiple_of(alignment);
        let entries = place_tensors(rows, base, bytes.len, &name)?;
        let table = TensorTable { files: vec![bytes], entries, name };
        Ok(Self { meta, arrays, table })
    }

    /// Typed access to the metadata.
    pub fn config(&self) -> ConfigMap<'_> {
        ConfigMap::new(&self.meta, &self.table.name)
    }
}

fn read_counts(cursor: &mut Cursor<'_>, name: &str) -> Result<(u64, u64)> {
    let magic = cursor.u32("magic number")?.to_le_bytes();
    if &magic != b"GGUF" {
        return Err(CheckpointError::malformed(
            name,
            "the magic bytes GGUF",
            format!("{:?}", magic.escape_ascii().to_string()),
            "this is no GGUF file",
        ));
    }
    let version = cursor.u32("version")?;
    if !(2..=3).contains(&version) {
        let big_endian = (2..=3).contains(&version.swap_bytes());
        return Err(CheckpointError::unsupported(
            format!("{name}: version"),
            "2 or 3, little-endian",
            if big_endian { "a big-endian file".to_owned() } else { version.to_string() },
            "convert the model again with a current llama.cpp",
        ));
    }
    let tensors = cursor.u64("tensor count")?;
    let keys = cursor.u64("metadata count")?;
    for (what, count, max, each) in
        [("tensor count", tensors, MAX_TENSORS, MIN_TENSOR_BYTES), ("metadata count", keys, MAX_KEYS, MIN_KEY_BYTES)]
    {
        cursor.check(what, count, each)?;
        if count > max {
            return Err(CheckpointError::malformed(
                format!("{name}: {what}"),
                format!("at most {max}"),
                count.to_string(),
                "the file is damaged: fetch it again",
            ));
        }
    }
    Ok((tensors, keys))
}

type Metadata = (Map<String, Value>, HashMap<String, Array>);

fn read_metadata(cursor: &mut Cursor<'_>, name: &str, keys: u64) -> Result<Metadata> {
    let (mut meta, mut arrays) = (Map::new(), HashMap::new());
    for _ in 0..keys {
        let key = cursor.string("metadata key")?;
        if meta.contains_key(&key) || arrays.contains_key(&key) {
            return Err(CheckpointError::malformed(
                format!("{name}: {key}"),
                "each key once",
                "it twice",
                "the file is damaged: fetch it again",
            ));
        }
        match read_value(cursor, &key)? {
            MetaValue::Scalar(value) => drop(meta.insert(key, value)),
            MetaValue::Array(array) => drop(arrays.insert(key, array)),
        }
    }
    Ok((meta, arrays))
}

fn alignment(config: &ConfigMap<'_>) -> Result<u64> {
    let alignment = config.opt_count("general.alignment", 1 << 20)?.unwrap_or(32);
    if alignment.is_multiple_of(8) {
        return Ok(alignment as u64);
    }
    Err(CheckpointError::malformed(
        config.what("general.alignment"),
        "a multiple of 8",
        alignment.to_string(),
        "the file is damaged: fetch it again",
    ))
}

fn read_tensor(cursor: &mut Cursor<'_>, file: &str, alignment: u64) -> Result<(String, Entry)> {
    let name = cursor.string("tensor name")?;
    let what = format!("{file}: tensor {name}");
    let damaged = "the file is damaged: fetch it again";
    let dims = cursor.u32("tensor dimensions")?;
    if !(1..=4).contains(&dims) {
        return Err(CheckpointError::malformed(what, "1 to 4 dimensions", dims.to_string(), damaged));
    }
    let mut shape = Vec::new();
    for _ in 0..dims {
        shape.push(cursor.u64("tensor shape")?);
    }
    let dtype = dtype(cursor.u32("tensor type")?, &what)?;
    let offset = cursor.u64("tensor offset")?;
    if !offset.is_multiple_of(alignment) {
        let expected = format!("an offset that is a multiple of {alignment}");
        return Err(CheckpointError::malformed(what, expected, offset.to_string(), damaged));
    }
    let sizes: Option<Vec<usize>> = shape.iter().rev().map(|&size| usize::try_from(size).ok()).collect();
    let elements = sizes.as_ref().and_then(|sizes| sizes.iter().try_fold(1_usize, |all, &size| all.checked_mul(size)));
    let whole_rows = shape[0] % dtype.block().0 as u64 == 0;
    let bytes = elements.filter(|&elements| elements > 0 && whole_rows).and_then(|elements| dtype.bytes(elements));
    match (sizes, bytes) {
        (Some(shape), Some(bytes)) => Ok((name, Entry { file: 0, offset, dtype, shape, bytes })),
        _ => Err(CheckpointError::malformed(
            what,
            format!("a shape that fills whole {} blocks", dtype.name()),
            format!("{shape:?}"),
            damaged,
        )),
    }
}

/// Turns offsets into file offsets, and checks that every tensor lies within the file and none overlaps another.
fn place_tensors(
    mut rows: Vec<(String, Entry)>,
    base: u64,
    file_len: u64,
    file: &str,
) -> Result<HashMap<String, Entry>> {
    rows.sort_by_key(|(_, entry)| entry.offset);
    let mut entries = HashMap::with_capacity(rows.len());
    let mut end = base;
    for (name, mut entry) in rows {
        let what = format!("{file}: tensor {name}");
        let start = entry.offset.checked_add(base);
        let stop = start.and_then(|start| start.checked_add(entry.bytes as u64));
        let (Some(start), Some(stop)) = (start, stop.filter(|&stop| stop <= file_len)) else {
            return Err(CheckpointError::truncated(
                what,
                format!("{} bytes at offset {}", entry.bytes, entry.offset.saturating_add(base)),
                format!("a file of {file_len} bytes"),
                "the file is cut short: fetch it again",
            ));
        };
        if start < end {
            let expected = format!("data after offset {end}");
            let hint = "two tensors overlap: the file is damaged";
            return Err(CheckpointError::malformed(what, expected, start.to_string(), hint));
        }
        end = stop;
        entry.offset = start;
        if entries.insert(name, entry).is_some() {
            return Err(CheckpointError::malformed(what, "each name once", "it twice", "the file is damaged"));
        }
    }
    Ok(entries)
}

fn dtype(kind: u32, what: &str) -> Result<Dtype> {
    Ok(match kind {
        0 => Dtype::F32,
        1 => Dtype::F16,
        2 => Dtype::Q4_0,
        3 => Dtype::Q4_1,
        6 => Dtype::Q5_0,
        7 => Dtype::Q5_1,
        8 => Dtype::Q8_0,
        12 => Dtype::Q4_K,
        13 => Dtype::Q5_K,
        14 => Dtype::Q6_K,
        26 => Dtype::I32,
        27 => Dtype::I64,
        30 => Dtype::Bf16,
        _ => {
            return Err(CheckpointError::wrong_dtype(
                what,
                "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K",
                format!("ggml type {kind}"),
                "quantise the model to one of these types",
            ));
        }
    })
}
