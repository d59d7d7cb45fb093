//! Random data to measure on: kernels can run faster on zeros.

use crate::device::{Device, DeviceBuffer, DeviceError};
use cudarc::driver::result;
use oasis_core::policy::split_mix64;

/// SplitMix64.
pub(crate) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        split_mix64(&mut self.0)
    }

    /// From -1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// `bytes` of bf16 numbers from -1 to 1; 8 MiB of them are repeated.
pub(crate) fn noise(device: &Device, bytes: usize) -> Result<DeviceBuffer<u16>, DeviceError> {
    const BLOCK: usize = 4 << 20;
    let mut random = Random(1);
    let numbers: Vec<u16> = (0..BLOCK).map(|_| (random.float().to_bits() >> 16) as u16).collect();
    let len = bytes.div_ceil(2).max(BLOCK);
    let mut buffer = device.zeros::<u16>(len)?;
    buffer.write(&numbers)?;
    let (start, mut filled) = (buffer.address(), BLOCK);
    while filled < len {
        let more = filled.min(len - filled);
        // SAFETY: both ranges are within the buffer and do not overlap.
        unsafe { result::memcpy_dtod_sync(start.offset(2 * filled).0, start.0, 2 * more) }
            .map_err(|error| DeviceError::new("filling scratch memory", error))?;
        filled += more;
    }
    device.synchronize()?;
    Ok(buffer)
}
