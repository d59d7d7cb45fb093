//! Random data to measure on: kernels can run faster on zeros.

use crate::device::{Device, DeviceBuffer, DeviceError};
use cudarc::driver::result;

/// SplitMix64.
pub(crate) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
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
