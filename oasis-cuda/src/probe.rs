//! Looks for the CUDA libraries and devices; every answer is data, none is a failure.

use crate::compile::Nvrtc;
use cudarc::driver::{result as driver, sys};
use serde::Serialize;

/// Compute capability that kernels are written for: they use bulk copies, which older devices lack, and products of warp
/// groups, which newer ones lack.
pub(crate) const CAPABILITY: (i32, i32) = (9, 0);

/// Oldest version of the driver, as it numbers them: CUDA 12.4 has green contexts.
const LEAST_DRIVER: i32 = 12_040;

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CudaProbe {
    /// The driver and its devices; `None` where there is no driver library (`libcuda`).
    pub driver: Option<Driver>,
    /// Whether the run-time compiler (`libnvrtc`) is there.
    pub nvrtc: bool,
    /// Whether cuBLASLt is there.
    pub cublaslt: bool,
}

/// The CUDA driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Driver {
    /// Newest CUDA version that it speaks, such as `13.0`; empty where it does not say.
    pub version: String,
    /// Whether that is 12.4 or newer, which this crate needs.
    pub is_new_enough: bool,
    /// Devices by ordinal.
    pub devices: Vec<CudaDevice>,
    /// Why the driver could not list its devices.
    pub problem: Option<String>,
}

/// One CUDA device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CudaDevice {
    /// Number by which it is asked for.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// Memory in bytes.
    pub memory: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
}

/// Looks for the driver, the libraries beside it and the devices. It never fails and creates no context.
pub fn probe() -> CudaProbe {
    // SAFETY: each call only tries to load a shared library by its usual name and drops it again; the libraries run
    // nothing but their own initialisers.
    let (cuda, nvrtc, cublaslt) =
        unsafe { (sys::is_culib_present(), Nvrtc::open().is_ok(), cudarc::cublaslt::sys::is_culib_present()) };
    // Without the library every driver call panics.
    CudaProbe { driver: cuda.then(probe_driver), nvrtc, cublaslt }
}

fn probe_driver() -> Driver {
    let (devices, problem) = match driver::init().and_then(|()| devices()) {
        Ok(devices) => (devices, None),
        Err(error) => (Vec::new(), Some(describe(&error))),
    };
    Driver { version: driver_version(), is_new_enough: is_new_enough(), devices, problem }
}

/// Newest CUDA version that the driver speaks; to be called only where there is one.
pub(crate) fn driver_version() -> String {
    match driver_number() {
        Some(version) => format!("{}.{}", version / 1000, version % 1000 / 10),
        None => String::new(),
    }
}

/// Whether the driver has all that this crate calls; to be called only where there is one.
pub(crate) fn is_new_enough() -> bool {
    driver_number().is_none_or(|version| version >= LEAST_DRIVER)
}

/// The CUDA version as the driver numbers it: 13000 is CUDA 13.0.
pub(crate) fn driver_number() -> Option<i32> {
    let mut version = 0;
    // SAFETY: the pointer is to a live integer; the call needs no initialised driver.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().is_ok().then_some(version)
}

fn devices() -> Result<Vec<CudaDevice>, driver::DriverError> {
    (0..driver::device::get_count()?)
        .map(|ordinal| {
            let device = driver::device::get(ordinal)?;
            // SAFETY: `device` was just given out by the driver.
            let attribute = |name| unsafe { driver::device::get_attribute(device, name) };
            Ok(CudaDevice {
                ordinal: usize::try_from(ordinal).unwrap_or_default(),
                name: driver::device::get_name(device)?,
                // SAFETY: as above.
                memory: unsafe { driver::device::total_mem(device) }? as u64,
                compute_capability: (
                    attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                    attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
                ),
            })
        })
        .collect()
}

/// The driver's name for an error; asked only where the driver library is loaded.
fn describe(error: &driver::DriverError) -> String {
    match error.error_name() {
        Ok(name) => name.to_string_lossy().into_owned(),
        Err(_) => format!("{:?}", error.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_is_safe_on_any_machine() {
        let found = probe();
        if let Some(driver) = &found.driver {
            assert!(driver.problem.is_none() || driver.devices.is_empty());
            for (ordinal, device) in driver.devices.iter().enumerate() {
                assert_eq!(device.ordinal, ordinal);
                assert!(device.memory > 0 && !device.name.is_empty());
            }
        }
        assert_eq!(probe(), found);
    }
}
