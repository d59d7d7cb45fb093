//! What the host knows of a request.

use oasis_core::geometry::KvFootprint;
use oasis_core::ids::TokenId;

/// Where a request is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    /// Another executor reads its prompt.
    Expected,
    /// Its prompt is being read: layers that were queued.
    Prefill { prompt: Vec<TokenId>, queued: usize },
    /// Its prompt is in, its first decode step has not been.
    First,
    /// Decoding.
    Decode,
    /// Something went wrong.
    Failed(String),
}

/// A request of the executor.
#[derive(Debug)]
pub(super) struct Request {
    /// Its row in all of the device's arrays.
    pub row: usize,
    pub phase: Phase,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Blocks reserved in host memory.
    pub blocks: usize,
    /// Position of the next token to run.
    pub position: usize,
    /// Positions that there is room for.
    pub end: usize,
    pub footprint: KvFootprint,
}
