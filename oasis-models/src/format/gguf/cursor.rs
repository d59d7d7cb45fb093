//! Sequential little-endian reads with every length checked against the file before anything is allocated.

use crate::format::bytes::Bytes;
use crate::format::error::{CheckpointError, Result};

const WINDOW: usize = 256 << 10;

/// A position in a file, read through a small window.
pub(super) struct Cursor<'a> {
    bytes: &'a Bytes,
    /// Offset in the file of the next byte.
    pub pos: u64,
    window: Vec<u8>,
    start: u64,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a Bytes) -> Self {
        Self { bytes, pos: 0, window: Vec::new(), start: 0 }
    }

    /// Name of a part of the file for messages.
    pub fn what(&self, part: &str) -> String {
        format!("{}: {part}", self.bytes.name)
    }

    /// Bytes from here to the end of the file.
    pub fn remaining(&self) -> u64 {
        self.bytes.len - self.pos
    }

    /// Checks that `count` items of at least `each` bytes can follow.
    pub fn check(&self, what: &str, count: u64, each: u64) -> Result<()> {
        if count.checked_mul(each).is_some_and(|bytes| bytes <= self.remaining()) {
            return Ok(());
        }
        Err(CheckpointError::truncated(
            self.what(what),
            format!("at most the {} bytes that follow offset {}", self.remaining(), self.pos),
            format!("{count} items of at least {each} bytes"),
            "the file is damaged or cut short: fetch it again",
        ))
    }

    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        self.check(what, N as u64, 1)?;
        let at = self.pos.checked_sub(self.start).filter(|&at| at + N as u64 <= self.window.len() as u64);
        let at = match at {
            Some(at) => at as usize,
            None => {
                self.window.resize(self.remaining().min(WINDOW as u64) as usize, 0);
                self.start = self.pos;
                self.bytes.read_exact_at(self.start, &mut self.window)?;
                0
            }
        };
        let mut out = [0; N];
        out.copy_from_slice(&self.window[at..at + N]);
        self.pos += N as u64;
        Ok(out)
    }

    pub fn u8(&mut self, what: &str) -> Result<u8> {
        Ok(self.take::<1>(what)?[0])
    }

    pub fn u16(&mut self, what: &str) -> Result<u16> {
        self.take(what).map(u16::from_le_bytes)
    }

    pub fn u32(&mut self, what: &str) -> Result<u32> {
        self.take(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &str) -> Result<u64> {
        self.take(what).map(u64::from_le_bytes)
    }

    /// `count` raw bytes.
    pub fn raw(&mut self, what: &str, count: u64) -> Result<Vec<u8>> {
        self.check(what, count, 1)?;
        let mut out = vec![0; count as usize];
        self.bytes.read_exact_at(self.pos, &mut out)?;
        self.pos += count;
        Ok(out)
    }

    /// Skips `count` bytes that are known to be there.
    pub fn skip(&mut self, what: &str, count: u64) -> Result<()> {
        self.check(what, count, 1)?;
        self.pos += count;
        Ok(())
    }

    /// A length-prefixed UTF-8 string.
    pub fn string(&mut self, what: &str) -> Result<String> {
        let length = self.u64(what)?;
        String::from_utf8(self.raw(what, length)?).map_err(|error| {
            CheckpointError::malformed(
                self.what(what),
                "UTF-8 text",
                format!("an invalid byte at {}", error.utf8_error().valid_up_to()),
                "the file is damaged: fetch it again",
            )
        })
    }
}
