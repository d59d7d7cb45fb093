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
            .check(|| format!("loading {}", S::ENTRY))?;
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
        self.device.bind()?;
        let mut argument = std::ptr::from_ref(params).cast_mut().cast();
        // SAFETY: the kernel has one parameter, which the driver copies during the call; `KernelParams` promises that it
        // has the kernel's layout, the caller answers for what it points to.
        unsafe {
            sys::cuLaunchKernel(
                self.function,
                grid.0,
                grid.1,
                1,
                self.threads,
                1,
                1,
                self.shared_bytes,
                stream.handle(),
                &raw mut argument,
                std::ptr::null_mut(),
            )
        }
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
