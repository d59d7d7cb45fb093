//! Compiled kernels on disk, so that a start costs no compilation.

use super::{Cubin, parse_log};
use sha2::{Digest, Sha256};
use std::io::{self, Write};
use std::path::PathBuf;

/// A folder of compiled kernels, one file a key: digest of the rest, length of the log, log, image.
#[derive(Debug, Clone)]
pub struct CubinCache {
    folder: PathBuf,
}

const DIGEST: usize = 32;

/// The user's folder of what can be made again: `oasis` in `$XDG_CACHE_HOME` or `~/.cache`.
pub(crate) fn user_cache() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let base = base.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))?;
    Some(base.join("oasis"))
}

impl CubinCache {
    /// A cache in `folder`, which is created when something is stored.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The user's own: `oasis/cubin` in `$XDG_CACHE_HOME` or `~/.cache`; `None` where there is no home folder.
    pub fn of_user() -> Option<Self> {
        user_cache().map(|folder| Self::new(folder.join("cubin")))
    }

    /// What was stored for `key`; a damaged file counts as none.
    pub fn get(&self, key: &str) -> Option<Cubin> {
        let bytes = std::fs::read(self.path(key)).ok()?;
        let (digest, rest) = bytes.split_at_checked(DIGEST)?;
        if Sha256::digest(rest).as_slice() != digest {
            return None;
        }
        let (length, rest) = rest.split_first_chunk()?;
        let (log, image) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        Some(Cubin { image: image.to_vec(), reports: parse_log(std::str::from_utf8(log).ok()?) })
    }

    /// Stores what was compiled for `key`; other processes see all of it or nothing.
    ///
    /// # Errors
    /// When the folder cannot be created or written.
    pub fn put(&self, key: &str, image: &[u8], log: &str) -> io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        let mut rest = (log.len() as u64).to_le_bytes().to_vec();
        rest.extend(log.as_bytes());
        rest.extend(image);
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        file.write_all(&Sha256::digest(&rest))?;
        file.write_all(&rest)?;
        file.persist(self.path(key)).map_err(|error| error.error)?;
        Ok(())
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.cubin"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "ptxas info : Compiling entry function 'k' for 'sm_90a'\nptxas info : Used 8 registers";

    #[test]
    fn what_was_stored_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(folder.path().join("new"));
        assert_eq!(cache.get("a"), None);
        cache.put("a", b"image", LOG).unwrap();
        let cubin = cache.get("a").unwrap();
        assert_eq!((cubin.image.as_slice(), cubin.reports[0].registers), (&b"image"[..], 8));
        assert_eq!(cache.get("b"), None);
    }

    #[test]
    fn a_damaged_or_short_file_counts_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(folder.path());
        cache.put("a", b"image", LOG).unwrap();
        let path = folder.path().join("a.cubin");
        let good = std::fs::read(&path).unwrap();
        for length in [0, 10, DIGEST, DIGEST + 4, good.len() - 1] {
            std::fs::write(&path, &good[..length]).unwrap();
            assert_eq!(cache.get("a"), None, "{length} bytes");
        }
        let mut flipped = good.clone();
        *flipped.last_mut().unwrap() ^= 1;
        std::fs::write(&path, flipped).unwrap();
        assert_eq!(cache.get("a"), None);
    }
}
