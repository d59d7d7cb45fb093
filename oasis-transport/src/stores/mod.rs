//! Stores: where the full KV of requests lives.

mod counters;
mod dram;
mod rules;
mod ssd;

pub use dram::Dram;
pub use ssd::{Leftover, Ssd, SsdIo, SsdStore};
