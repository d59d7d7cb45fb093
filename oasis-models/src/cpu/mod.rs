//! The CPU executor: right first, and the reference for every device executor.

mod decoder;
mod eagle3;
mod executor;
pub mod kernels;
mod linear;
mod moe;
mod observer;
mod prefill;
mod request;
mod rope;
mod step;

pub use executor::{CpuExecutor, CpuOptions, CpuPolicies};
pub use observer::{LayerView, StepObserver};
