//! Positioned reads from a file or from bytes embedded in the binary.

use std::fs::File;
use std::path::Path;

use super::error::{CheckpointError, Result};

/// Small text files (JSON, templates) larger than this are refused.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Something that can be read at any offset.
#[derive(Debug)]
pub(crate) struct Bytes {
    /// Name for messages.
    pub name: String,
    /// Size in bytes.
    pub len: u64,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    File(File),
    Static(&'static [u8]),
}

impl Bytes {
    /// Opens a file; the name in messages is its path.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let fail = |error: std::io::Error| io_error(&name, &error);
        let file = File::open(path).map_err(fail)?;
        let meta = file.metadata().map_err(fail)?;
        if !meta.is_file() {
            return Err(CheckpointError::not_found(
                &name,
                "a regular file",
                "something else",
                "name a checkpoint folder or a .gguf file",
            ));
        }
        Ok(Self { len: meta.len(), name, origin: Origin::File(file) })
    }

    /// Wraps bytes that live as long as the program.
    pub fn embedded(name: impl Into<String>, bytes: &'static [u8]) -> Self {
        Self { name: name.into(), len: bytes.len() as u64, origin: Origin::Static(bytes) }
    }

    /// Fills `out` from `offset`; a read past the end is [`CheckpointError::Truncated`].
    pub fn read_exact_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(out.len() as u64).filter(|&end| end <= self.len);
        let Some(end) = end else {
            return Err(CheckpointError::truncated(
                &self.name,
                format!("{} bytes at offset {offset}", out.len()),
                format!("a file of {} bytes", self.len),
                "the file is cut short: fetch it again",
            ));
        };
        match &self.origin {
            Origin::Static(bytes) => out.copy_from_slice(&bytes[offset as usize..end as usize]),
            Origin::File(file) => read_file_at(file, offset, out).map_err(|error| io_error(&self.name, &error))?,
        }
        Ok(())
    }

    /// The whole content as UTF-8, for the small text files of a checkpoint.
    pub fn read_text(&self) -> Result<String> {
        if self.len > MAX_TEXT_BYTES {
            return Err(CheckpointError::malformed(
                &self.name,
                format!("a text file of at most {MAX_TEXT_BYTES} bytes"),
                format!("{} bytes", self.len),
                "this is not the file its name promises",
            ));
        }
        let mut bytes = vec![0; self.len as usize];
        self.read_exact_at(0, &mut bytes)?;
        String::from_utf8(bytes).map_err(|error| {
            CheckpointError::malformed(
                &self.name,
                "UTF-8 text",
                format!("an invalid byte at offset {}", error.utf8_error().valid_up_to()),
                "the file is damaged: fetch it again",
            )
        })
    }
}

#[cfg(unix)]
fn read_file_at(file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(not(unix))]
fn read_file_at(mut file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(out)
}

fn io_error(name: &str, error: &std::io::Error) -> CheckpointError {
    if error.kind() == std::io::ErrorKind::NotFound {
        return CheckpointError::not_found(name, "a file", "nothing", "check the path");
    }
    CheckpointError::io(name, "a readable file", error.to_string(), "check the path and its permissions")
}
