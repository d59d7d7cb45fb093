//! Files that are too large for the repository: `shared/` beside the workspace.

use std::path::{Path, PathBuf};

/// The root of the workspace.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace").to_path_buf()
}

/// A file or folder of the shared references; `None`, said aloud, where they are not there.
///
/// # Panics
/// In CI, where nothing may be skipped.
pub fn shared(path: &str) -> Option<PathBuf> {
    let full = workspace().parent().expect("a workspace lies in a folder").join("shared").join(path);
    available(full, "the references are not beside the workspace")
}

/// The SmolLM2-135M-Instruct GGUF that `scripts/fetch-smollm2.sh` fetches; `None`, said aloud, where it is not there.
///
/// # Panics
/// In CI, where nothing may be skipped.
pub fn smollm2() -> Option<PathBuf> {
    let path = std::env::var_os("OASIS_SMOLLM2_GGUF")
        .map_or_else(|| workspace().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf"), PathBuf::from);
    available(path, "run scripts/fetch-smollm2.sh")
}

fn available(path: PathBuf, hint: &str) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    assert!(std::env::var_os("CI").is_none(), "{} is missing in CI: {hint}", path.display());
    eprintln!("SKIPPED: {} is missing: {hint}", path.display());
    None
}
