//! Why a CUDA device cannot be used.

use crate::CudaProbe;

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
    /// Why device `ordinal` cannot be used, given what a probe found.
    pub fn explain(found: &CudaProbe, ordinal: usize) -> Self {
        let cpu = "device.kind = \"cpu\" runs anywhere";
        let error = |expected: &str, found: String, hint: String| Self { expected: expected.to_owned(), found, hint };
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
        error(
            "a build with a CUDA executor",
            format!("{}, but no executor for it in this build", device.name),
            format!("this version computes on the CPU only; {cpu}"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CudaDevice, Driver};

    fn with(driver: Option<Driver>) -> CudaProbe {
        CudaProbe { driver, nvrtc: false, cublas: false, cublaslt: false }
    }

    fn device() -> CudaDevice {
        CudaDevice { ordinal: 0, name: "Test GPU".to_owned(), memory: 1 << 30, compute_capability: (9, 0) }
    }

    #[test]
    fn a_missing_driver_is_named() {
        let error = CudaUnavailable::explain(&with(None), 0).to_string();
        assert!(error.starts_with("CUDA was asked for (device.kind = \"cuda\"): expected the NVIDIA driver library"));
        assert!(error.contains("found none\n  hint: "), "{error}");
    }

    #[test]
    fn a_failing_driver_gives_its_reason() {
        let problem = Some("CUDA_ERROR_NO_DEVICE".to_owned());
        let found = with(Some(Driver { version: "13.0".to_owned(), devices: vec![], problem }));
        assert_eq!(CudaUnavailable::explain(&found, 0).found, "CUDA_ERROR_NO_DEVICE");
    }

    #[test]
    fn an_ordinal_beyond_the_devices_is_named() {
        let found = with(Some(Driver { version: "13.0".to_owned(), devices: vec![device()], problem: None }));
        let error = CudaUnavailable::explain(&found, 3);
        assert_eq!((error.expected.as_str(), error.found.as_str()), ("a device with ordinal 3", "one device, 0"));
    }

    #[test]
    fn a_present_device_does_not_hide_the_missing_executor() {
        let found = with(Some(Driver { version: "13.0".to_owned(), devices: vec![device()], problem: None }));
        let error = CudaUnavailable::explain(&found, 0);
        assert_eq!(error.expected, "a build with a CUDA executor");
        assert!(error.found.contains("Test GPU"));
    }
}
