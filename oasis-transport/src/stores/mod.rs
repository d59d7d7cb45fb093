//! Stores: where the full KV of requests lives.

mod counters;
mod dram;
mod rules;
#[cfg(unix)]
mod ssd;
mod tiered;

pub use dram::Dram;
pub(crate) use dram::{BlockMemory, in_memory};
#[cfg(unix)]
pub use ssd::{Leftover, Ssd, SsdIo, SsdStore};
pub use tiered::Tiered;
