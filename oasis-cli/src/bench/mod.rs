//! Benchmarks: each figure beside its floor.

pub mod cpu;
