//! The Hugging Face hub and its cache folder.
//!
//! `hf-hub` talks to the hub and lays out the cache; what it does not check is checked here: names that would leave
//! the cache folder, a commit that changes midway, the size and the checksum of what arrived.

mod download;
mod error;
mod select;

pub use download::{Fetched, Repository};
pub use select::{Selection, check_repository, check_revision};

use crate::env;
use std::path::Path;

/// The hub where neither `--endpoint` nor the environment names another.
pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// Address of the hub: `argument`, else the environment's, else the default; without a slash at its end.
pub fn endpoint(argument: Option<&str>) -> String {
    let address = argument.map(str::to_owned).or_else(env::hub_endpoint);
    address.unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()).trim_end_matches('/').to_owned()
}

/// Access token: the environment's, else the one that `huggingface-cli login` left.
pub fn token() -> Option<String> {
    let file = || std::fs::read_to_string(env::hub_token_file()?).ok();
    env::hub_token().or_else(file).map(|token| token.trim().to_owned()).filter(|token| !token.is_empty())
}

/// Names of the model repositories in a cache folder.
pub fn cached_repositories(cache: &Path) -> Vec<String> {
    let mut names: Vec<String> = (std::fs::read_dir(cache).into_iter().flatten().flatten())
        .filter(|entry| entry.path().join("snapshots").is_dir())
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_prefix("models--")?.replacen("--", "/", 1)))
        .collect();
    names.sort();
    names
}
