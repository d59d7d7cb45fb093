//! Digests of the files that points read, so that a changed file is measured anew.

use crate::sweep::time::utc;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Larger files, which are weights and long recordings, are known by their size and time of change: reading gigabytes
/// before every sweep to find what nearly never changed would cost more than to measure anew after a copy.
const WHOLE_UP_TO: u64 = 64 << 20;

/// Digests of files, each taken once.
#[derive(Default)]
pub struct Digests {
    known: HashMap<PathBuf, Option<String>>,
}

impl Digests {
    /// The digest of a file; `None` where there is no file to read.
    pub fn of(&mut self, path: &Path) -> Option<String> {
        if !self.known.contains_key(path) {
            self.known.insert(path.to_owned(), digest(path).ok().flatten());
        }
        self.known[path].clone()
    }
}

fn digest(path: &Path) -> io::Result<Option<String>> {
    let facts = std::fs::metadata(path)?;
    Ok(match facts.is_file() {
        // A pipe would be empty for the measurement afterwards.
        false => None,
        true if facts.len() > WHOLE_UP_TO => Some(stamp(&facts)),
        true => {
            let mut hash = Sha256::new();
            io::copy(&mut File::open(path)?, &mut hash)?;
            Some(format!("sha256 {}", hexadecimal(&hash.finalize())))
        }
    })
}

/// Size and time of change of a file, in words.
pub fn stamp(facts: &Metadata) -> String {
    let changed = facts.modified().unwrap_or(UNIX_EPOCH);
    let nanoseconds = changed.duration_since(UNIX_EPOCH).unwrap_or_default().subsec_nanos();
    format!("{} bytes of {}.{nanoseconds:09}Z", facts.len(), utc(changed).trim_end_matches('Z'))
}

/// Two digits a byte.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn digest_of(path: &Path) -> Option<String> {
        Digests::default().of(path)
    }

    #[test]
    fn small_files_are_known_by_their_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text.txt");
        assert_eq!(digest_of(&path), None);
        assert_eq!(digest_of(folder.path()), None);
        std::fs::write(&path, "abc").unwrap();
        // The example of FIPS 180-2.
        let abc = "sha256 ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest_of(&path).as_deref(), Some(abc));
        File::options().write(true).open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
        assert_eq!(digest_of(&path).as_deref(), Some(abc));
        std::fs::write(&path, "abd").unwrap();
        assert_ne!(digest_of(&path).as_deref(), Some(abc));
    }

    #[test]
    fn large_files_are_known_by_size_and_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let set = |length, time| {
            file.as_file().set_len(length).unwrap();
            file.as_file().set_modified(UNIX_EPOCH + Duration::from_nanos(time)).unwrap();
            digest_of(file.path()).unwrap()
        };
        let first = set(WHOLE_UP_TO + 1, 5);
        assert_eq!(first, "67108865 bytes of 1970-01-01T00:00:00.000000005Z");
        assert_eq!(first, set(WHOLE_UP_TO + 1, 5));
        assert_ne!(first, set(WHOLE_UP_TO + 1, 6));
        assert_ne!(first, set(WHOLE_UP_TO + 2, 5));
    }

    #[test]
    fn a_file_is_read_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut digests = Digests::default();
        let before = digests.of(file.path());
        std::fs::write(file.path(), "abc").unwrap();
        assert_eq!(digests.of(file.path()), before);
    }
}
