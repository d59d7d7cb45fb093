//! Why sessions end.

use super::codec::WireError;
use std::time::Duration;

/// Why a session ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The peer closed it, or its machine did.
    #[error("the peer closed the connection")]
    Closed,
    /// The network failed.
    #[error("the connection failed: {0}")]
    Network(String),
    /// Nothing moved for too long.
    #[error("{what}: no answer within {} ms", .after.as_millis())]
    TimedOut {
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
    /// The peer sent something that is no message.
    #[error("{0}")]
    Damaged(#[from] WireError),
    /// A message out of place.
    #[error("expected {expected}, found the message `{found}`")]
    Unexpected {
        /// What should have come.
        expected: &'static str,
        /// What came.
        found: &'static str,
    },
    /// Encryption could not be agreed on.
    #[error("TLS: {0}")]
    Tls(String),
    /// One end does not want the other.
    #[error("refused: {0}")]
    Refused(String),
}

impl From<std::io::Error> for SessionError {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match error.kind() {
            UnexpectedEof | ConnectionReset | BrokenPipe => Self::Closed,
            _ => Self::Network(error.to_string()),
        }
    }
}
