//! `oasis pull`: downloads a model into the cache of the Hugging Face hub.

use crate::error::{CliError, CliResult};
use crate::hub::{self, Fetched, Repository, Selection};
use crate::{env, text};
use clap::Args;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// Repository, OWNER/NAME
    repo: String,
    /// Branch, tag or commit
    #[arg(long, default_value = "main")]
    revision: String,
    /// Download these files only, such as '*Q8_0.gguf'; may be repeated
    #[arg(long, value_name = "PATTERN")]
    file: Vec<String>,
    /// Address of the hub or a mirror [default: $HF_ENDPOINT, else https://huggingface.co]
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
}

/// Downloads what is missing and prints the folder (or the one GGUF file) that `oasis run --model` takes.
///
/// # Errors
/// When a name is wrong, the hub cannot be reached or does not deliver what it announced.
pub fn run(args: &PullArgs, out: &mut dyn Write) -> CliResult {
    hub::check_repository(&args.repo)?;
    hub::check_revision(&args.revision)?;
    let cache = env::hub_cache().ok_or_else(|| {
        CliError::input(
            "no folder for downloads: expected a home folder, found none",
            format!("set {}", env::HF_HUB_CACHE),
        )
    })?;
    let endpoint = hub::endpoint(args.endpoint.as_deref());
    let repository = Repository::open(&endpoint, &args.repo, &args.revision, &cache)?;
    let Selection { mut files, index } = Selection::choose(&args.repo, repository.files(), &args.file)?;

    let mut done = 0;
    while let Some(file) = files.get(done) {
        match repository.fetch(file)? {
            Fetched::Cached(size) => eprintln!("{file}: {}, in the cache", text::size(size)),
            Fetched::Downloaded(size) => eprintln!("{file}: {}, downloaded", text::size(size)),
        }
        if index.as_ref() == Some(file) {
            files.extend(repository.shards(&files[done])?);
        }
        done += 1;
    }
    Ok(writeln!(out, "{}", model_path(&repository, &files).display())?)
}

fn model_path(repository: &Repository, files: &[String]) -> PathBuf {
    match files {
        [file] if file.ends_with(".gguf") => repository.folder().join(file),
        _ => repository.folder(),
    }
}
