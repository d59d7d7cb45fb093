//! Stores: where the full KV of requests lives.

mod dram;
mod slab;

pub use dram::Dram;
