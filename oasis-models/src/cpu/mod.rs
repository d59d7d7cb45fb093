//! The CPU executor: right first, and the reference for every device executor.

mod attention;
mod decoder;
mod eagle3;
mod executor;
mod fingerprint;
mod hand_over;
pub mod kernels;
mod layer_kv;
mod linear;
mod mlp;
mod model;
mod moe;
mod prefill;
mod request;
mod rotation;
mod step;

pub use executor::{CpuExecutor, CpuOptions, Residency, SparseParts};
pub use fingerprint::{fingerprint, fingerprint_of};
pub use model::CpuModel;
pub use prefill::PromptState;
