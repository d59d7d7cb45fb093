//! A share of the device's multiprocessors.

use super::error::Check;
use super::stream::{Priority, priority_range};
use super::{Device, DeviceError, Stream};
use cudarc::driver::sys;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// Multiprocessors that the work of some streams stays within, while other streams may use all: a green context.
pub struct Partition {
    device: Device,
    context: sys::CUgreenCtx,
    multiprocessors: u32,
}

// SAFETY: a green context is used here to create streams only, which the driver allows from any thread.
unsafe impl Send for Partition {}
// SAFETY: as above.
unsafe impl Sync for Partition {}

impl Partition {
    pub(super) fn new(device: &Device, multiprocessors: u32) -> Result<Self, DeviceError> {
        let what = || format!("setting {multiprocessors} of {} multiprocessors apart", device.facts.multiprocessors);
        device.bind()?;
        let ordinal = device.context.cu_device();
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        let mut all = MaybeUninit::<sys::CUdevResource>::zeroed();
        // SAFETY: the answer has a place.
        unsafe { sys::cuDeviceGetDevResource(ordinal, all.as_mut_ptr(), kind) }.result().check(what)?;
        let (mut part, mut rest) = (all, MaybeUninit::<sys::CUdevResource>::zeroed());
        let mut groups = 1;
        // SAFETY: one group is asked for, which has a place, as the rest has; the input was filled in above.
        unsafe {
            sys::cuDevSmResourceSplitByCount(
                part.as_mut_ptr(),
                &raw mut groups,
                all.as_ptr(),
                rest.as_mut_ptr(),
                0,
                multiprocessors,
            )
        }
        .result()
        .check(what)?;
        // SAFETY: the driver filled it in; the resource is one of multiprocessors.
        let count = unsafe { part.assume_init().__bindgen_anon_1.sm.smCount };
        let mut description = std::ptr::null_mut();
        // SAFETY: one resource is given, which the driver copies.
        unsafe { sys::cuDevResourceGenerateDesc(&raw mut description, part.as_mut_ptr(), 1) }.result().check(what)?;
        let mut context = std::ptr::null_mut();
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: the description was generated above, for this device.
        unsafe { sys::cuGreenCtxCreate(&raw mut context, description, ordinal, flags) }.result().check(what)?;
        Ok(Self { device: device.clone(), context, multiprocessors: count })
    }

    /// How many there are: what was asked for, rounded up to what the device can set apart.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// A new stream whose kernels run on these multiprocessors only.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn stream(self: &Arc<Self>, priority: Priority) -> Result<Stream, DeviceError> {
        self.device.bind()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let priority = priority_range()?.of(priority);
        // SAFETY: the green context lives as long as the stream, which holds on to it.
        unsafe { sys::cuGreenCtxStreamCreate(&raw mut stream, self.context, flags, priority) }
            .result()
            .check(|| format!("creating a stream on {} multiprocessors", self.multiprocessors))?;
        let owner = PartitionStream { partition: self.clone(), stream };
        // SAFETY: the stream was created above, and its owner destroys it.
        Ok(unsafe { Stream::of(&self.device, stream, Arc::new(owner)) })
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        if self.device.synchronize().is_ok() {
            // SAFETY: created once; its streams hold on to it, so there are none any more.
            let _ = unsafe { sys::cuGreenCtxDestroy(self.context) };
        }
    }
}

/// A stream of a partition, owned.
struct PartitionStream {
    partition: Arc<Partition>,
    stream: sys::CUstream,
}

// SAFETY: the driver's handles may be used from any thread that binds the context.
unsafe impl Send for PartitionStream {}
// SAFETY: as above.
unsafe impl Sync for PartitionStream {}

impl Drop for PartitionStream {
    fn drop(&mut self) {
        if self.partition.device.bind().is_ok() {
            // SAFETY: created once, destroyed once; the driver finishes what is queued.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}
