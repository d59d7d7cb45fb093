//! Compiled kernels on a device.

use super::error::Check;
use super::{Device, DeviceError, Stream};
use crate::compile::Compiler;
use crate::kernels::KernelSpec;
use cudarc::driver::{result, sys};
use std::ffi::CString;
use std::marker::PhantomData;

/// A kernel of shape `S`, loaded.
pub struct Kernel<S> {
    device: Device,
    _spec: PhantomData<S>,
    module: sys::CUmodule,
    function: sys::CUfunction,
    threads: u32,
    shared_bytes: u32,
}

// SAFETY: the driver's handles may be used from any thread that binds the context, which every method does.
unsafe impl<S: Send> Send for Kernel<S> {}
// SAFETY: as above; launches of one function from several threads are allowed.
unsafe impl<S: Sync> Sync for Kernel<S> {}

impl<S: KernelSpec> Kernel<S> {
    pub(super) fn load(device: &Device, compiler: &Compiler, spec: &S) -> Result<Self, DeviceError> {
        let cubin = compiler
            .compile(&spec.unit())
            .map_err(|error| DeviceError::new(format!("compiling {}", S::ENTRY), error))?;
        device.bind()?;
        // SAFETY: the image is a whole CUBIN, which the driver copies.
        let module = unsafe { result::module::load_data(cubin.image.as_ptr().cast()) }
            .check(|| format!("loading {}", S::ENTRY))
            .map_err(|error| {
                error.hint("is libnvrtc newer than the driver? OASIS_NVRTC_DIR names the folder of another")
            })?;
        let mut kernel = Self {
            device: device.clone(),
            _spec: PhantomData,
            module,
            function: std::ptr::null_mut(),
            threads: spec.threads(),
            shared_bytes: spec.shared_bytes() as u32,
        };
        let name = CString::new(S::ENTRY).expect("names of kernels have no zero byte");
        // SAFETY: the module was just loaded and lives as long as the kernel.
        kernel.function =
            unsafe { result::module::get_function(module, name) }.check(|| format!("finding {}", S::ENTRY))?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function lives.
        unsafe { result::function::set_function_attribute(kernel.function, attribute, kernel.shared_bytes as i32) }
            .check(|| format!("asking for {} bytes of shared memory for {}", kernel.shared_bytes, S::ENTRY))?;
        Ok(kernel)
    }

    /// Queues a launch of `grid` CTAs.
    ///
    /// # Safety
    /// Every address of `params` is of memory with the layout, the size and the contents that the parameter's
    /// documentation asks for, and stays valid until the launch is done. No other work touches what it writes meanwhile.
    ///
    /// # Errors
    /// [`DeviceError`] when the launch is refused; errors while it runs surface at the next synchronisation.
    pub unsafe fn launch(&self, stream: &Stream, grid: (u32, u32), params: &S::Params) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        unsafe { self.launch_in_clusters(stream, grid, 1, params) }
    }

    /// Queues a launch of `grid` CTAs in clusters of `cluster`, 1 to 8, of which the grid's width is a multiple.
    ///
    /// # Safety
    /// As for [`Kernel::launch`].
    ///
    /// # Errors
    /// As for [`Kernel::launch`].
    pub unsafe fn launch_in_clusters(
        &self,
        stream: &Stream,
        grid: (u32, u32),
        cluster: u32,
        params: &S::Params,
    ) -> Result<(), DeviceError> {
        use sys::CUlaunchAttributeID as Id;
        self.device.bind()?;
        // SAFETY: all zero is a value of this plain union.
        let value = || unsafe { std::mem::zeroed::<sys::CUlaunchAttributeValue>() };
        let (mut size, mut early) = (value(), value());
        size.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        early.programmaticStreamSerializationAllowed = 1;
        let mut attributes = Vec::new();
        let mut add = |id, value| attributes.push(sys::CUlaunchAttribute { id, pad: [0; 4], value });
        if cluster > 1 {
            add(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, size);
        }
        // In a part of the device run the long kernels of prefills, which gain nothing by it.
        if S::WAITS && !stream.is_part() {
            add(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, early);
        }
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream.handle(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let mut argument = std::ptr::from_ref(params).cast_mut().cast();
        // SAFETY: the kernel has one parameter, which the driver copies during the call, as it does the configuration and
        // its attributes; `KernelParams` promises that it has the kernel's layout, the caller answers for what it points to.
        unsafe { sys::cuLaunchKernelEx(&raw const config, self.function, &raw mut argument, std::ptr::null_mut()) }
            .result()
            .check(|| format!("launching {}", S::ENTRY))
    }
}

impl<S> Drop for Kernel<S> {
    fn drop(&mut self) {
        if self.device.synchronize().is_ok() {
            // SAFETY: the module was loaded once; nothing of it runs any more.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}
