//! Downloads files of one repository into the cache and verifies them.

use super::error::{Place, is_passing};
use super::select::{is_plain, shards};
use crate::error::{CliError, CliResult};
use crate::progress::DownloadBar;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo, Metadata};
use hf_hub::{Cache, Repo, RepoType};
use sha2::{Digest, Sha256};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Attempts at one file before giving up; each goes on where the last one broke off.
const ATTEMPTS: u32 = 4;

/// A repository at one commit.
pub struct Repository {
    endpoint: String,
    name: String,
    revision: String,
    repo: Repo,
    api: Api,
    remote: ApiRepo,
    cache: Cache,
    commit: String,
    files: Vec<String>,
}

/// How a file got here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// It was here already.
    Cached(u64),
    /// It was downloaded.
    Downloaded(u64),
}

impl Repository {
    /// Asks the hub for the commit and the files of a repository.
    ///
    /// # Errors
    /// When there is no such repository, no access or no hub.
    pub fn open(endpoint: &str, name: &str, revision: &str, cache: &Path) -> CliResult<Self> {
        let repo = Repo::with_revision(name.to_owned(), RepoType::Model, revision.to_owned());
        let place = Place { endpoint, repository: name, revision, file: None };
        let cache = Cache::new(cache.to_owned());
        let api = (ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint.to_owned()))
            .with_token(super::token())
            .with_user_agent("oasis", env!("CARGO_PKG_VERSION"))
            .build()
            .map_err(|error| place.explain(error))?;
        let remote = api.repo(repo.clone());
        let info = attempt(|| remote.info()).map_err(|error| place.explain(error))?;
        if !is_plain(&info.sha) {
            return Err(CliError::Failure(format!("{endpoint}: expected a commit of {name}, found {:?}", info.sha)));
        }
        Ok(Self {
            endpoint: endpoint.to_owned(),
            name: name.to_owned(),
            revision: revision.to_owned(),
            repo,
            api,
            remote,
            cache,
            commit: info.sha,
            files: info.siblings.into_iter().map(|sibling| sibling.rfilename).collect(),
        })
    }

    /// Files of the repository.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// The folder that holds the files of this commit.
    pub fn folder(&self) -> PathBuf {
        self.cache.repo(self.repo.clone()).pointer_path(&self.commit)
    }

    /// Shards that the downloaded index file names.
    ///
    /// # Errors
    /// When the index is not one.
    pub fn shards(&self, index: &str) -> CliResult<Vec<String>> {
        shards(&self.name, &fs::read_to_string(self.folder().join(index))?, &self.files)
    }

    /// Brings one file into the cache, unless it is there in full.
    ///
    /// An interrupted download leaves a `.part` file, from which the next one goes on.
    ///
    /// # Errors
    /// When the hub does not deliver what it announced.
    pub fn fetch(&self, file: &str) -> CliResult<Fetched> {
        let place =
            Place { endpoint: &self.endpoint, repository: &self.name, revision: &self.revision, file: Some(file) };
        let url = self.remote.url(file);
        let remote = attempt(|| self.api.metadata(&url)).map_err(|error| place.explain(error))?;
        self.check_metadata(file, &remote)?;
        let size = remote.size() as u64;
        let pointer = self.folder().join(file);
        let blob = self.cache.repo(self.repo.clone()).blob_path(remote.etag());
        if fs::metadata(&pointer).is_ok_and(|local| local.len() == size) {
            return Ok(Fetched::Cached(size));
        }
        // Of another size, or a link to nothing.
        remove(&pointer)?;

        attempt(|| {
            // A part that is as long as the file cannot be continued.
            let part = blob.with_extension("part");
            if fs::metadata(&part).is_ok_and(|part| part.len() >= size) {
                remove(&part)?;
            }
            self.remote.download_with_progress(file, DownloadBar::new(file))?;
            let arrived = fs::metadata(&pointer)?.len();
            if arrived != size {
                remove(&pointer)?;
                remove(&blob)?;
                let problem = format!("expected {size} bytes, found {arrived}; the file was removed");
                return Err(ApiError::IoError(io::Error::new(io::ErrorKind::UnexpectedEof, problem)));
            }
            Ok(())
        })
        .map_err(|error| place.explain(error))?;
        self.verify_checksum(file, &remote, &pointer, &blob)?;
        Ok(Fetched::Downloaded(size))
    }

    /// The tag becomes a path, and all files must be of one commit.
    fn check_metadata(&self, file: &str, remote: &Metadata) -> CliResult {
        if !is_plain(remote.etag()) {
            let found = remote.etag();
            return Err(CliError::Failure(format!("{}/{file}: expected a plain ETag, found {found:?}", self.name)));
        }
        if remote.commit_hash() != self.commit {
            return Err(CliError::failure(
                format!("{}/{file}: expected commit {}, found {}", self.name, self.commit, remote.commit_hash()),
                "the repository changed meanwhile: run the command again",
            ));
        }
        Ok(())
    }

    /// Large files have their SHA-256 as tag.
    fn verify_checksum(&self, file: &str, remote: &Metadata, pointer: &Path, blob: &Path) -> CliResult {
        let expected = remote.etag();
        if expected.len() != 64 || !expected.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Ok(());
        }
        let mut hasher = Sha256::new();
        io::copy(&mut fs::File::open(pointer)?, &mut hasher)?;
        let found: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if found.eq_ignore_ascii_case(expected) {
            return Ok(());
        }
        remove(pointer)?;
        remove(blob)?;
        Err(CliError::failure(
            format!("{}/{file}: expected SHA-256 {expected}, found {found}; the file was removed", self.name),
            "run the command again",
        ))
    }
}

/// Repeats what may pass, waiting a little longer each time.
fn attempt<T>(mut action: impl FnMut() -> Result<T, ApiError>) -> Result<T, ApiError> {
    let mut attempts = 1;
    loop {
        match action() {
            Err(error) if attempts < ATTEMPTS && is_passing(&error) => {
                tracing::info!("attempt {attempts} of {ATTEMPTS}: {error}");
                std::thread::sleep(Duration::from_millis(250) * 2u32.pow(attempts - 1));
                attempts += 1;
            }
            result => return result,
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
