//! Stores: where the full KV of requests lives.

mod counters;
mod dram;
mod rules;
#[cfg(unix)]
mod ssd;
mod tiered;

pub use dram::Dram;
#[cfg(unix)]
pub use ssd::{Leftover, Ssd, SsdIo, SsdStore};
pub use tiered::Tiered;
