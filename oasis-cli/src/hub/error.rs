//! What can go wrong at the hub, in words.

use crate::env;
use crate::error::CliError;
use hf_hub::api::sync::ApiError;
use ureq::Error as Http;

/// Where a request went wrong.
pub struct Place<'a> {
    /// Address of the hub.
    pub endpoint: &'a str,
    /// Repository.
    pub repository: &'a str,
    /// Branch, tag or commit.
    pub revision: &'a str,
    /// File, where it was about one.
    pub file: Option<&'a str>,
}

impl Place<'_> {
    /// Puts a hub error into words; wrong names and missing rights are wrong input, the rest is failed work.
    pub fn explain(&self, error: ApiError) -> CliError {
        let Self { endpoint, repository, revision, .. } = self;
        match error {
            ApiError::RequestError(http) => self.explain_http(*http),
            ApiError::TooManyRetries(inner) => self.explain(*inner),
            ApiError::IoError(error) => CliError::failure(
                format!("{}: the download broke off: {error}", self.what()),
                "run the same command again: it goes on from what has arrived",
            ),
            ApiError::LockAcquisition(path) => CliError::failure(
                format!("{}: another process holds {}", self.what(), path.display()),
                "wait for the other download of the same file",
            ),
            other => CliError::failure(
                format!(
                    "{endpoint}: expected the answer of a Hugging Face hub for {repository} at {revision}, found: {other}"
                ),
                self.endpoint_hint(),
            ),
        }
    }

    fn explain_http(&self, error: Http) -> CliError {
        let Self { endpoint, repository, revision, .. } = self;
        match error {
            Http::StatusCode(404) => CliError::input(
                match self.file {
                    Some(file) => format!("{repository} at {revision} has no file {file}"),
                    None => format!("{endpoint} has no model `{repository}` with revision `{revision}`"),
                },
                "check the spelling of OWNER/NAME and --revision",
            ),
            Http::StatusCode(status @ (401 | 403)) => CliError::input(
                format!(
                    "{endpoint} refuses access to `{repository}` (status {status}): it is private, gated or not there"
                ),
                format!("check the spelling, accept its licence on the web, and set {} to a token", env::HF_TOKEN),
            ),
            Http::StatusCode(status) => CliError::failure(
                format!("{}: expected an answer, found status {status}", self.what()),
                "the hub is busy or down: try again later",
            ),
            Http::BadUri(_) | Http::Http(_) => CliError::input(
                format!("--endpoint: expected an address such as {}, found `{endpoint}`", super::DEFAULT_ENDPOINT),
                self.endpoint_hint(),
            ),
            Http::Json(error) => CliError::failure(
                format!("{endpoint}: expected the hub's list of files in JSON, found: {error}"),
                self.endpoint_hint(),
            ),
            other => {
                CliError::failure(format!("cannot get {} from {endpoint}: {other}", self.what()), self.endpoint_hint())
            }
        }
    }

    fn what(&self) -> String {
        match self.file {
            Some(file) => format!("{}/{file}", self.repository),
            None => self.repository.to_owned(),
        }
    }

    fn endpoint_hint(&self) -> String {
        format!("--endpoint or {} names the hub; check the network and the address", env::HF_ENDPOINT)
    }
}

/// Whether the same request may succeed a moment later.
pub fn is_passing(error: &ApiError) -> bool {
    match error {
        ApiError::RequestError(http) => {
            matches!(**http, Http::StatusCode(429 | 500..=599) | Http::Io(_) | Http::Protocol(_) | Http::Timeout(_))
        }
        // A connection that breaks while the body is read.
        ApiError::IoError(error) => !matches!(
            error.kind(),
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::NotFound
        ),
        _ => false,
    }
}
