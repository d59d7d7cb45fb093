//! Why a CUDA device cannot be used.

use crate::CudaProbe;
use crate::probe::CAPABILITY;

/// CUDA was asked for and cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("CUDA was asked for (device.kind = \"cuda\"): expected {expected}, found {found}\n  hint: {hint}")]
pub struct CudaUnavailable {
    /// What CUDA needs.
    pub expected: String,
    /// What there is.
    pub found: String,
    /// What to do about it.
    pub hint: String,
}

impl CudaUnavailable {
    /// Checks that device `ordinal` can be used, given what a probe found.
    ///
    /// # Errors
    /// The first thing that is missing.
    pub fn check(found: &CudaProbe, ordinal: usize) -> Result<(), Self> {
        let cpu = "device.kind = \"cpu\" runs anywhere";
        let error =
            |expected: &str, found: String, hint: String| Err(Self { expected: expected.to_owned(), found, hint });
        let Some(driver) = &found.driver else {
            return error(
                "the NVIDIA driver library (libcuda)",
                "none".to_owned(),
                format!("install the NVIDIA driver, or start the container with GPU access; {cpu}"),
            );
        };
        if let Some(problem) = &driver.problem {
            return error(
                "a working NVIDIA driver",
                problem.clone(),
                format!("`nvidia-smi` shows whether the driver sees the GPU; {cpu}"),
            );
        }
        if !driver.is_new_enough {
            return error(
                "a driver of CUDA 12.4 or newer",
                format!("one of {}", driver.version),
                format!("install driver 550 or newer; {cpu}"),
            );
        }
        let devices = driver.devices.len();
        let Some(device) = driver.devices.get(ordinal) else {
            return error(
                &format!("a device with ordinal {ordinal}"),
                match devices {
                    0 => "no device".to_owned(),
                    1 => "one device, 0".to_owned(),
                    _ => format!("{devices} devices, 0 to {}", devices - 1),
                },
                format!("device.ordinal chooses the GPU, CUDA_VISIBLE_DEVICES hides others; {cpu}"),
            );
        };
        let (major, minor) = device.compute_capability;
        if device.compute_capability != CAPABILITY {
            return error(
                "compute capability 9.0 (Hopper: H100, H200, GH200)",
                format!("{} with {major}.{minor}", device.name),
                format!("kernels use bulk copies and warp-group products of that generation; {cpu}"),
            );
        }
        for (there, library, hint) in [
            (
                found.nvrtc,
                "the run-time compiler (libnvrtc)",
                "the nvidia-cuda-nvrtc wheel or the CUDA toolkit has it; OASIS_NVRTC_DIR names its folder",
            ),
            (
                found.cublaslt,
                "cuBLASLt (libcublasLt)",
                "the nvidia-cublas wheel or the CUDA toolkit has it; LD_LIBRARY_PATH finds it",
            ),
        ] {
            if !there {
                return error(library, "none".to_owned(), format!("{hint}; {cpu}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CudaDevice, Driver};

    fn with(driver: Option<Driver>) -> CudaProbe {
        CudaProbe { driver, nvrtc: false, cublaslt: false }
    }

    fn device() -> CudaDevice {
        CudaDevice { ordinal: 0, name: "Test GPU".to_owned(), memory: 1 << 30, compute_capability: (9, 0) }
    }

    fn driver() -> Driver {
        Driver { version: "13.0".to_owned(), is_new_enough: true, devices: vec![device()], problem: None }
    }

    #[test]
    fn a_missing_driver_is_named() {
        let error = CudaUnavailable::check(&with(None), 0).unwrap_err().to_string();
        assert!(error.starts_with("CUDA was asked for (device.kind = \"cuda\"): expected the NVIDIA driver library"));
        assert!(error.contains("found none\n  hint: "), "{error}");
    }

    #[test]
    fn a_failing_driver_gives_its_reason() {
        let problem = Some("CUDA_ERROR_NO_DEVICE".to_owned());
        let found = with(Some(Driver { devices: vec![], problem, ..driver() }));
        assert_eq!(CudaUnavailable::check(&found, 0).unwrap_err().found, "CUDA_ERROR_NO_DEVICE");
    }

    #[test]
    fn an_ordinal_beyond_the_devices_is_named() {
        let error = CudaUnavailable::check(&with(Some(driver())), 3).unwrap_err();
        assert_eq!((error.expected.as_str(), error.found.as_str()), ("a device with ordinal 3", "one device, 0"));
    }

    #[test]
    fn another_device_an_old_driver_and_missing_libraries_are_named() {
        for (capability, found) in [((8, 0), "Test GPU with 8.0"), ((10, 0), "Test GPU with 10.0")] {
            let devices = vec![CudaDevice { compute_capability: capability, ..device() }];
            let other = CudaUnavailable::check(&with(Some(Driver { devices, ..driver() })), 0).unwrap_err();
            assert_eq!(other.found, found);
        }
        let old = Driver { version: "12.2".to_owned(), is_new_enough: false, ..driver() };
        assert_eq!(CudaUnavailable::check(&with(Some(old)), 0).unwrap_err().found, "one of 12.2");
        let mut found = with(Some(driver()));
        assert!(CudaUnavailable::check(&found, 0).unwrap_err().expected.contains("libnvrtc"));
        found.nvrtc = true;
        assert!(CudaUnavailable::check(&found, 0).unwrap_err().expected.contains("libcublasLt"));
        found.cublaslt = true;
        assert_eq!(CudaUnavailable::check(&found, 0), Ok(()));
    }
}
