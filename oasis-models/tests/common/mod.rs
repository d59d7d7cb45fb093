//! Files beside the workspace that not every checkout has: absent, tests say so aloud, and fail in CI.
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::{Path, PathBuf};

/// The file or folder, or `None` after saying that the test is skipped.
pub fn present(path: PathBuf, how: &str) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    assert!(std::env::var_os("CI").is_none(), "{} is absent: {how}", path.display());
    eprintln!("SKIPPED: {} is absent: {how}", path.display());
    None
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A path under the folder of models and references beside the workspace.
pub fn shared(path: &str) -> Option<PathBuf> {
    present(workspace().join("../shared").join(path), "references live beside the workspace, in ../shared")
}

/// SmolLM2-135M-Instruct as GGUF.
pub fn smollm2() -> Option<PathBuf> {
    let path = match std::env::var_os("OASIS_SMOLLM2_GGUF") {
        Some(path) => PathBuf::from(path),
        None => workspace().join(".models/SmolLM2-135M-Instruct.Q4_1.gguf"),
    };
    present(path, "run scripts/fetch-smollm2.sh")
}

/// A folder of the crate's assets.
pub fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets").join(name)
}

/// Reads a file of the shared folder as JSON.
pub fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// All fixture folders.
pub const FIXTURES: [&str; 7] =
    ["qwen3", "qwen3-tied", "llama", "llama3-rope", "yarn-rope", "qwen3-moe", "qwen3-moe-mixed"];
