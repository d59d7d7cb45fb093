//! Metadata values: scalars become JSON numbers and strings, arrays stay as raw bytes until they are asked for.

use serde_json::{Number, Value};

use super::cursor::Cursor;
use crate::format::error::{CheckpointError, Result};

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// An array of the metadata, kept as the file holds it.
#[derive(Debug)]
pub(crate) struct Array {
    kind: u32,
    count: usize,
    raw: Vec<u8>,
}

/// A scalar or an array.
pub(super) enum MetaValue {
    Scalar(Value),
    Array(Array),
}

/// Bytes of a scalar of that type.
fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn float(value: f64) -> Value {
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}

fn unknown(what: String, kind: u32) -> CheckpointError {
    CheckpointError::malformed(
        what,
        "a value type from 0 to 12, and no arrays of arrays",
        kind.to_string(),
        "the file is damaged or of a newer version of GGUF",
    )
}

/// Reads one value; non-finite floats become `null`, which counts as absent.
pub(super) fn read_value(cursor: &mut Cursor<'_>, key: &str) -> Result<MetaValue> {
    let kind = cursor.u32(key)?;
    Ok(MetaValue::Scalar(match kind {
        0 => cursor.u8(key)?.into(),
        1 => (cursor.u8(key)? as i8).into(),
        2 => cursor.u16(key)?.into(),
        3 => (cursor.u16(key)? as i16).into(),
        4 => cursor.u32(key)?.into(),
        5 => (cursor.u32(key)? as i32).into(),
        6 => float(f32::from_bits(cursor.u32(key)?).into()),
        7 => (cursor.u8(key)? != 0).into(),
        STRING => cursor.string(key)?.into(),
        ARRAY => return read_array(cursor, key).map(MetaValue::Array),
        10 => cursor.u64(key)?.into(),
        11 => (cursor.u64(key)? as i64).into(),
        12 => float(f64::from_bits(cursor.u64(key)?)),
        _ => return Err(unknown(cursor.what(key), kind)),
    }))
}

fn read_array(cursor: &mut Cursor<'_>, key: &str) -> Result<Array> {
    let kind = cursor.u32(key)?;
    let count = cursor.u64(key)?;
    let bytes = match scalar_bytes(kind) {
        Some(each) => {
            cursor.check(key, count, each)?;
            count * each
        }
        None if kind == STRING => string_run(cursor, key, count)?,
        None => return Err(unknown(cursor.what(key), kind)),
    };
    Ok(Array { kind, count: count as usize, raw: cursor.raw(key, bytes)? })
}

/// Bytes that `count` strings take from here; the cursor stays where it is.
fn string_run(cursor: &mut Cursor<'_>, key: &str, count: u64) -> Result<u64> {
    cursor.check(key, count, 8)?;
    let start = cursor.pos;
    for _ in 0..count {
        let length = cursor.u64(key)?;
        cursor.skip(key, length)?;
    }
    let bytes = cursor.pos - start;
    cursor.pos = start;
    Ok(bytes)
}

impl Array {
    /// The strings of a string array; `None` for another type or text that is not UTF-8.
    pub fn strings(&self) -> Option<Vec<&str>> {
        if self.kind != STRING {
            return None;
        }
        let mut rest = self.raw.as_slice();
        let mut out = Vec::with_capacity(self.count);
        for _ in 0..self.count {
            let (length, tail) = rest.split_first_chunk::<8>()?;
            let (text, tail) = tail.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
            out.push(std::str::from_utf8(text).ok()?);
            rest = tail;
        }
        Some(out)
    }

    /// The numbers of a 32-bit integer array; `None` for another type.
    pub fn integers(&self) -> Option<Vec<i32>> {
        let chunks = self.raw.as_chunks::<4>().0.iter();
        matches!(self.kind, 4 | 5).then(|| chunks.map(|bytes| i32::from_le_bytes(*bytes)).collect())
    }
}
