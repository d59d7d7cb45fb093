//! Which rows a step runs.

use crate::kernels::Address;

/// Which rows a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// The first `n` rows, each over its working set (or over its pages in dense decoding).
    Batch(usize),
    /// The first decode step of one row, which sees its full KV and chooses its first working set.
    First(FirstStep),
}

/// A request's first decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FirstStep {
    pub row: usize,
    /// Layers, from the first one on, whose full KV the prefill left on the device.
    pub kept: usize,
    /// Where that of the others must be fetched from.
    pub fetch: Option<HostLayers>,
}

/// A request's KV in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostLayers {
    /// `[layers][reserved blocks][kv_heads]` entries.
    pub address: Address,
    /// Bytes from a layer to the next.
    pub stride: usize,
    /// Bytes of the complete blocks of a layer.
    pub bytes: usize,
}

impl Scope {
    pub fn first_row(self) -> usize {
        match self {
            Self::Batch(_) => 0,
            Self::First(first) => first.row,
        }
    }

    pub fn requests(self) -> usize {
        match self {
            Self::Batch(requests) => requests,
            Self::First(_) => 1,
        }
    }

    pub fn is_first(self) -> bool {
        matches!(self, Self::First(_))
    }
}
