//! Many small copies at once.

use super::error::Check;
use super::{DeviceError, Stream};
use crate::kernels::Address;
use crate::probe::driver_number;
use cudarc::driver::sys;

/// A copy of a few bytes; either side may be device memory or pinned host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryCopy {
    /// Source.
    pub from: Address,
    /// Destination.
    pub to: Address,
    /// Bytes, at least one.
    pub bytes: usize,
}

impl Stream {
    /// Whether the driver takes many copies in one call: since CUDA 13.0.
    pub fn takes_batches() -> bool {
        driver_number().is_some_and(|version| version >= 13_000)
    }

    /// Queues copies that do not depend on one another: in one call where the driver takes batches, else one by one.
    ///
    /// # Safety
    /// As for [`Stream::copy`], for each of them.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub unsafe fn copy_all(&self, copies: &[MemoryCopy]) -> Result<(), DeviceError> {
        if copies.is_empty() {
            return Ok(());
        }
        if !Self::takes_batches() {
            // SAFETY: the caller answers for the ranges.
            return copies.iter().try_for_each(|copy| unsafe { self.copy(copy.to, copy.from, copy.bytes) });
        }
        self.device().bind()?;
        let mut to: Vec<sys::CUdeviceptr> = copies.iter().map(|copy| copy.to.0).collect();
        let mut from: Vec<sys::CUdeviceptr> = copies.iter().map(|copy| copy.from.0).collect();
        let mut bytes: Vec<usize> = copies.iter().map(|copy| copy.bytes).collect();
        // Hints are for managed memory.
        let nowhere = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let mut first = 0;
        // SAFETY: three arrays of as many elements and one set of attributes for all of them, which the driver reads
        // during the call; the caller answers for the ranges.
        unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                copies.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                self.handle(),
            )
        }
        .result()
        .check(|| format!("queueing {} copies", copies.len()))
    }
}
