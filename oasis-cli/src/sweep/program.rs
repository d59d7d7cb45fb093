//! Which build of the program measured.

use crate::sweep::inputs::stamp;
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// A build: a program with plugins of its own has the version and commit of `oasis`, but another file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Program {
    /// Version of oasis.
    pub version: String,
    /// Commit it was built from, with `+` where files differed from it; absent where that was not known.
    pub commit: Option<String>,
    /// Size and time of the program's file; absent where it was not found.
    pub build: Option<String>,
}

impl Program {
    /// The one that runs.
    pub fn this() -> &'static Self {
        // Looked at once: a build during a sweep replaces the file, not what runs.
        static THIS: OnceLock<Program> = OnceLock::new();
        THIS.get_or_init(|| Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: option_env!("OASIS_COMMIT").map(str::to_owned),
            build: std::env::current_exe().and_then(std::fs::metadata).ok().map(|facts| stamp(&facts)),
        })
    }

    /// In words, without the build.
    pub fn name(&self) -> String {
        format!("oasis {} ({})", self.version, self.commit.as_deref().unwrap_or("commit not known"))
    }

    /// In words.
    pub fn describe(&self) -> String {
        let commit = self.commit.as_deref().unwrap_or("not known");
        format!("oasis {}, commit {commit}, {}", self.version, self.build.as_deref().unwrap_or("file not known"))
    }
}
