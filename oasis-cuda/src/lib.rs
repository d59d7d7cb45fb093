//! What there is of CUDA on this machine, found without linking against any of it.

#![allow(unsafe_code)]

mod error;
mod probe;

pub use error::CudaUnavailable;
pub use probe::{CudaDevice, CudaProbe, Driver, probe};
