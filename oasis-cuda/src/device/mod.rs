//! The device: contexts, streams, graphs, memory and kernels, each owned, each error with its operation's name.

mod batch;
mod buffer;
mod error;
mod kernel;
mod partition;
mod pinned;
mod range;
mod stream;
mod tensor_map;

pub use batch::MemoryCopy;
pub use buffer::DeviceBuffer;
pub use error::DeviceError;
pub use kernel::Kernel;
pub use partition::Partition;
pub use pinned::PinnedBuffer;
pub use range::Range;
pub use stream::{Event, Graph, Priority, Stream};
pub use tensor_map::{HeadRows, TensorMap};

use crate::compile::{Compiler, CubinCache, Nvrtc};
use crate::kernels::KernelSpec;
use crate::probe::{self, CAPABILITY};
use bytemuck::{Pod, Zeroable};
use cudarc::driver::{CudaContext, result, sys};
use error::Check;
use std::sync::Arc;

/// One GPU, ready for use.
#[derive(Clone)]
pub struct Device {
    context: Arc<CudaContext>,
    /// What the device is.
    pub facts: Facts,
}

/// Facts about a device that do not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Product name.
    pub name: String,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
}

impl Facts {
    /// Architecture to compile for.
    pub fn arch(&self) -> String {
        let (major, minor) = self.compute_capability;
        // The "a" lets in instructions that only this generation has.
        format!("sm_{major}{minor}a")
    }
}

/// Product names of the devices that the driver shows, by ordinal; none without a driver. Opens none of them.
pub fn names() -> Vec<String> {
    // SAFETY: this only tries to load libcuda by its usual names.
    if !unsafe { sys::is_culib_present() } || result::init().is_err() {
        return Vec::new();
    }
    let count = result::device::get_count().unwrap_or(0);
    (0..count).filter_map(|ordinal| result::device::get_name(result::device::get(ordinal).ok()?).ok()).collect()
}

impl Device {
    /// Opens the device with this ordinal.
    ///
    /// # Errors
    /// [`DeviceError`] without a driver of CUDA 12.4 or newer, without the device, or when it is not of compute capability 9.0.
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        // SAFETY: this only tries to load libcuda by its usual names.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::new("opening the NVIDIA driver", "libcuda is not there")
                .hint("install the driver, or start the container with GPU access"));
        }
        if !probe::is_new_enough() {
            let problem = format!("expected a driver of CUDA 12.4 or newer, found one of {}", probe::driver_version());
            return Err(DeviceError::new("opening the NVIDIA driver", problem).hint("install driver 550 or newer"));
        }
        let context = CudaContext::new(ordinal).check(|| format!("opening CUDA device {ordinal}"))?;
        // SAFETY: cudarc's own buffers, whose use it would track, are not used here.
        unsafe { context.disable_event_tracking() };
        let facts = Facts {
            name: context.name().check(|| "asking for the device's name")?,
            multiprocessors: context
                .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
                .check(|| "asking for the multiprocessors")? as u32,
            memory: context.total_mem().check(|| "asking for the memory")? as u64,
            compute_capability: context.compute_capability().check(|| "asking for the compute capability")?,
        };
        if facts.compute_capability != CAPABILITY {
            let (major, minor) = facts.compute_capability;
            return Err(DeviceError::new(
                format!("opening {}", facts.name),
                format!("expected compute capability 9.0, found {major}.{minor}"),
            )
            .hint("device.kind = \"cpu\" runs anywhere"));
        }
        Ok(Self { context, facts })
    }

    /// A compiler for this device, with the user's cache.
    ///
    /// # Errors
    /// [`DeviceError`] where there is no NVRTC.
    pub fn compiler(&self) -> Result<Compiler, DeviceError> {
        let nvrtc = Nvrtc::open().map_err(|error| DeviceError::new("opening the run-time compiler", error))?;
        Ok(Compiler::new(nvrtc, self.facts.arch(), CubinCache::of_user()))
    }

    /// Compiles and loads a kernel.
    ///
    /// # Errors
    /// [`DeviceError`] when it does not compile or the driver refuses it.
    pub fn load<S: KernelSpec>(&self, compiler: &Compiler, spec: &S) -> Result<Kernel<S>, DeviceError> {
        Kernel::load(self, compiler, spec)
    }

    /// A new stream, not ordered with any other.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn stream(&self, priority: Priority) -> Result<Stream, DeviceError> {
        Stream::new(self, priority)
    }

    /// Sets multiprocessors apart for some streams: at least so many, rounded up to what the device can give.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has fewer.
    pub fn partition(&self, multiprocessors: u32) -> Result<Arc<Partition>, DeviceError> {
        Partition::new(self, multiprocessors).map(Arc::new)
    }

    /// A new event that records times.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn event(&self) -> Result<Event, DeviceError> {
        Event::new(self)
    }

    /// Memory for `len` elements, all zero.
    ///
    /// # Errors
    /// [`DeviceError`] when there is not that much.
    pub fn zeros<T: Pod>(&self, len: usize) -> Result<DeviceBuffer<T>, DeviceError> {
        DeviceBuffer::zeros(self, len)
    }

    /// Memory with a copy of `data`.
    ///
    /// # Errors
    /// [`DeviceError`] when there is not that much.
    pub fn upload<T: Pod>(&self, data: &[T]) -> Result<DeviceBuffer<T>, DeviceError> {
        let mut buffer = self.zeros(data.len())?;
        buffer.write(data)?;
        Ok(buffer)
    }

    /// Page-locked host memory that the device can address, all zero. Pinning takes seconds a hundred gigabytes;
    /// `progress` is told how many bytes are done, from several threads.
    ///
    /// # Errors
    /// [`DeviceError`] when the host refuses, with how far it came.
    pub fn pinned(&self, bytes: usize, progress: &(dyn Fn(usize) + Sync)) -> Result<PinnedBuffer, DeviceError> {
        PinnedBuffer::new(self, bytes, progress)
    }

    /// Free and total memory in bytes.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.context.mem_get_info().check(|| "asking for the free memory")
    }

    /// Waits until the device has nothing to do.
    ///
    /// # Errors
    /// [`DeviceError`] of any work before: the device is lost then.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.context.synchronize().check(|| "waiting for the device")
    }

    /// Makes the device's context the current one of this thread.
    pub(crate) fn bind(&self) -> Result<(), DeviceError> {
        self.context.bind_to_thread().check(|| "binding the device's context")
    }
}

// SAFETY: two unsigned 64-bit numbers, or numbers without padding between them; every bit pattern is a value.
unsafe impl Zeroable for crate::kernels::EntryCopy {}
// SAFETY: as above.
unsafe impl Pod for crate::kernels::EntryCopy {}
// SAFETY: two 32-bit and three 64-bit numbers, no padding; every bit pattern is a value.
unsafe impl Zeroable for crate::kernels::CopyList {}
// SAFETY: as above.
unsafe impl Pod for crate::kernels::CopyList {}
