//! What can go wrong.

use std::time::Duration;

/// Why UCX cannot be used here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: expected {expected}, found {found}\n  hint: {hint}")]
pub struct Unavailable {
    /// What was tried.
    pub what: String,
    /// What it needs.
    pub expected: String,
    /// What there is.
    pub found: String,
    /// What can be done.
    pub hint: String,
}

/// Why a peer's memory cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// UCX has given the peer up; the connection is closed.
    #[error("the connection over UCX is lost: {0}")]
    Lost(String),
    /// Not complete in time. The connection is closed, so that nothing of the read can arrive late.
    #[error("reading over UCX: not complete within {} ms; the connection is closed", .0.as_millis())]
    TimedOut(Duration),
    /// The peer was closed before.
    #[error("the connection over UCX has been closed")]
    Closed,
    /// What is to be read does not lie in the peer's pool, or does not fit the buffer.
    #[error("expected a part of {limit} bytes of {what}, found {len} bytes at {offset}")]
    OutOfBounds {
        /// Which memory.
        what: &'static str,
        /// Its bytes.
        limit: u64,
        /// Where.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// A description of memory that is damaged.
    #[error("description of a peer's memory: expected {expected}, found {found}")]
    Descriptor {
        /// What should have been there.
        expected: String,
        /// What was.
        found: String,
    },
    /// A peer whose UCX is another release: their wire formats may differ.
    #[error(
        "UCX: expected release {ours} at both ends, found {theirs} at the peer\n  hint: install the same on both nodes"
    )]
    Versions {
        /// `major.minor` here.
        ours: String,
        /// `major.minor` of the peer.
        theirs: String,
    },
    /// The buffer's memory is not registered with the engine.
    #[error("expected a buffer of a pool of this engine, found another")]
    ForeignBuffer,
    /// The engine has ended.
    #[error("the UCX engine has stopped")]
    Stopped,
}
