//! The CPU executor.

pub mod kernels;
pub mod rope;
