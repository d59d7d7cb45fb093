//! Built-in transports and KV stores of OasisKV, one file a kind.
//!
//! A program that wants them by name links this crate: `use oasis_transport as _;`.

#[cfg(unix)]
pub mod disk;
pub mod remote;
mod slab;
pub mod stores;
pub mod transports;
