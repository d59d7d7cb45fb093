//! The CPU executor.

pub mod kernels;
