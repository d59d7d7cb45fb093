//! Stores: where the full KV of requests lives.

mod counters;
mod dram;
mod rules;
mod ssd;
mod tiered;

pub use dram::Dram;
pub use ssd::{Leftover, Ssd, SsdIo, SsdStore};
pub use tiered::Tiered;
