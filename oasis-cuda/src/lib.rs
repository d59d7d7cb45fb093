//! The CUDA side of OasisKV: kernels, their compilation, and the device that runs them.
//!
//! Nothing links against CUDA: driver and compiler are opened at run time, and this crate builds without either.
//! [`compile`] turns kernels and device code of policies into machine code, [`device`] owns contexts, streams and
//! memory, [`gemm`] multiplies matrices, [`kernels`] says what there is to launch and [`layout`] where its bytes lie.

#![allow(unsafe_code)]

pub mod compile;
pub mod device;
mod error;
pub mod executor;
pub mod gemm;
pub mod kernels;
pub mod layout;
pub mod measure;
pub mod model;
mod probe;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;

pub use error::CudaUnavailable;
pub use probe::{CudaDevice, CudaProbe, Driver, probe};
