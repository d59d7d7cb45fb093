//! Chosen algorithms on disk, so that a start times nothing twice.

use super::{GemmShape, Streamed};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io;
use std::path::{Path, PathBuf};

/// All that a choice depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Key {
    /// Product name of the device.
    pub device: String,
    /// Newest CUDA version that the driver speaks.
    pub driver: String,
    /// Version of cuBLASLt.
    pub cublaslt: usize,
    /// Multiprocessors that the algorithm was chosen for.
    pub multiprocessors: Option<u32>,
    /// Most bytes of workspace.
    pub workspace: usize,
    /// Algorithms that were asked for.
    pub candidates: usize,
    /// Most rows for which our own kernels were tried, and their version.
    pub streams: (usize, u32),
    /// Product.
    pub shape: GemmShape,
}

/// Who runs a product, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Algorithm {
    /// cuBLASLt.
    Library {
        /// Rows that are computed.
        rows: usize,
        /// The library's description, meaningful to the same version only.
        data: [u64; 8],
    },
    /// Our own kernel.
    Streamed(Streamed),
}

/// A chosen algorithm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Choice {
    /// What runs.
    pub algorithm: Algorithm,
    /// Time of one product in microseconds.
    pub micros: f64,
}

#[derive(Serialize, Deserialize)]
struct Entry<K, C> {
    key: K,
    choice: C,
}

/// What was stored for `key`; a file that cannot be read counts as none.
pub(crate) fn get<K: Serialize + DeserializeOwned + PartialEq, C: DeserializeOwned>(
    folder: &Path,
    key: &K,
) -> Option<C> {
    let entry: Entry<K, C> = serde_json::from_slice(&std::fs::read(path(folder, key)).ok()?).ok()?;
    (entry.key == *key).then_some(entry.choice)
}

/// Stores a choice; other processes see all of it or nothing.
pub(crate) fn put<K: Serialize, C: Serialize>(folder: &Path, key: &K, choice: &C) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer_pretty(&mut file, &Entry { key, choice })?;
    file.persist(path(folder, key)).map_err(|error| error.error)?;
    Ok(())
}

fn path<K: Serialize>(folder: &Path, key: &K) -> PathBuf {
    let text = serde_json::to_vec(key).expect("a struct of numbers and text");
    let name: String = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
    folder.join(format!("{name}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(rows: usize) -> Key {
        Key {
            device: "Test GPU".to_owned(),
            driver: "13.0".to_owned(),
            cublaslt: 130_000,
            multiprocessors: None,
            workspace: 1 << 25,
            candidates: 16,
            streams: (16, 1),
            shape: GemmShape::dense(rows, 4096, 1024),
        }
    }

    #[test]
    fn a_choice_comes_back_for_its_own_key_only() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("new");
        let algorithm = Algorithm::Library { rows: 8, data: [u64::MAX, 1, 2, 3, 4, 5, 6, 7] };
        let choice = Choice { algorithm, micros: 12.5 };
        assert_eq!(get::<_, Choice>(&folder, &key(2)), None);
        put(&folder, &key(2), &choice).unwrap();
        assert_eq!(get(&folder, &key(2)), Some(choice.clone()));
        assert_eq!(get::<_, Choice>(&folder, &key(3)), None);
        let newer = Key { cublaslt: 130_100, ..key(2) };
        assert_eq!(get::<_, Choice>(&folder, &newer), None);
        // A file under another key's name is not believed.
        std::fs::copy(path(&folder, &key(2)), path(&folder, &newer)).unwrap();
        assert_eq!(get::<_, Choice>(&folder, &newer), None);
    }

    #[test]
    fn a_damaged_file_counts_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let algorithm = Algorithm::Streamed(Streamed { tile: 64, split: 2 });
        put(folder.path(), &key(1), &Choice { algorithm, micros: 1.0 }).unwrap();
        let path = path(folder.path(), &key(1));
        let text = std::fs::read(&path).unwrap();
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        assert_eq!(get::<_, Choice>(folder.path(), &key(1)), None);
    }
}
