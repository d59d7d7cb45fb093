//! What users tell an engine.

use crate::library::Search;

/// Which of UCX's transports carries reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// Reliable connections of RDMA adapters, RoCE or InfiniBand (`UCX_TLS=rc`).
    Rdma,
    /// TCP sockets (`UCX_TLS=tcp`), for machines without an adapter: the same code, and the owner's CPU does what an
    /// adapter would.
    Tcp,
}

/// How an engine is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Where UCX is.
    pub search: Search,
    /// What carries reads; `UCX_TLS` in the environment wins.
    pub wire: Wire,
    /// Adapter and port such as `mlx5_0:1`, or the network interface of [`Wire::Tcp`]; several with commas. Without one,
    /// UCX chooses among adapters, and TCP stays on loopback. `UCX_NET_DEVICES` in the environment wins.
    pub device: Option<String>,
}

/// Who may touch a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Peers read it.
    Lent,
    /// Only this process: reads land here.
    Landing,
}

/// One piece of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where it goes: bytes from the buffer's first.
    pub local: usize,
    /// Where it lies: bytes from the first of the peer's pool.
    pub remote: u64,
    /// Bytes.
    pub len: usize,
}
