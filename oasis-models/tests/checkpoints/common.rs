//! Files beside the workspace that not every checkout has: absent, tests say so aloud, and fail in CI.

use std::path::{Path, PathBuf};

use oasis_models::weights::{Matrix, MatrixData};
use safetensors::{Dtype, SafeTensors};

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

/// Elements of a tensor of a safetensors file, in f32.
pub fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    match tensor.dtype() {
        Dtype::F32 => tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::BF16 => tensor.data().as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
        other => panic!("{other:?}"),
    }
}

/// Elements of a matrix in f32, `[rows][cols]`.
pub fn values(matrix: &Matrix) -> Vec<f32> {
    let data = match &matrix.data {
        MatrixData::F32(data) => data.clone(),
        MatrixData::Bf16(data) => data.iter().map(|value| value.to_f32()).collect(),
    };
    assert_eq!(data.len(), matrix.rows * matrix.cols);
    data
}
