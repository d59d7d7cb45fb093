//! What a device can do at most: the ceilings that kernels and steps are measured against.

mod entries;
pub mod kernels;
pub(crate) mod random;

pub use entries::{EntryRates, gather_options};

use crate::device::{Device, DeviceBuffer, DeviceError, PinnedBuffer, Priority};
use crate::kernels::{Stream, StreamParams};
use serde::Serialize;

/// Ceilings of a device, in bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ceilings {
    /// A plain kernel reads device memory.
    pub memory_read: f64,
    /// The copy engine, pinned host memory to the device.
    pub host_to_device: f64,
    /// The copy engine, device to pinned host memory.
    pub device_to_host: f64,
}

impl Ceilings {
    /// Measures for about a second, with 4 GiB of device memory (less where less is free) and 256 MiB of pinned memory.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver, or without NVRTC.
    pub fn measure(device: &Device) -> Result<Self, DeviceError> {
        let memory_read = memory_read(device)?;
        let host = device.pinned(PinnedBuffer::CHUNK, &|_| ())?;
        let buffer: DeviceBuffer<u8> = device.zeros(PinnedBuffer::CHUNK)?;
        let (near, far) = (buffer.address(), host.address());
        let copy = |to, from| -> Result<f64, DeviceError> {
            let stream = device.stream(Priority::Middle)?;
            let (start, end) = (device.event()?, device.event()?);
            let mut best = f64::MAX;
            for _ in 0..5 {
                stream.record(&start)?;
                // SAFETY: both sides have one chunk of bytes and outlive the copy, which is waited for.
                unsafe { stream.copy(to, from, PinnedBuffer::CHUNK)? };
                stream.record(&end)?;
                stream.synchronize()?;
                best = best.min(start.micros_until(&end)?);
            }
            Ok(PinnedBuffer::CHUNK as f64 / best * 1e6)
        };
        Ok(Self { memory_read, host_to_device: copy(near, far)?, device_to_host: copy(far, near)? })
    }
}

/// Bytes a second that a plain kernel reads.
///
/// # Errors
/// [`DeviceError`] from the driver, or without NVRTC.
pub fn memory_read(device: &Device) -> Result<f64, DeviceError> {
    let free = device.memory()?.0;
    let bytes = (4_usize << 30).min(free / 2) / 4096 * 4096;
    let data = random::noise(device, bytes)?;
    let sum: DeviceBuffer<u32> = device.zeros(1)?;
    let kernel = device.load(&device.compiler()?, &Stream)?;
    let stream = device.stream(Priority::Middle)?;
    let params = StreamParams { data: data.address(), count: (bytes / 16) as u64, sum: sum.address() };
    let mut best = f64::MAX;
    for ctas in [1, 2, 4, 8] {
        let grid = (ctas * device.facts.multiprocessors, 1);
        // SAFETY: `data` has `count` units and `sum` one element; both outlive the launches.
        let micros = unsafe { kernels::micros(device, &stream, 5, |_| kernel.launch(&stream, grid, &params))? };
        best = best.min(micros);
    }
    Ok(bytes as f64 / best * 1e6)
}
