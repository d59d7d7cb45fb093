//! cuBLASLt: the library, its handle and its descriptors, each owned.

use super::{GemmShape, Output};
use crate::device::{Device, DeviceError};
use crate::kernels::Address;
use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::sys;
use std::ffi::c_void;

/// Gives an answer of the library the name of its operation.
pub(super) fn check(status: sys::cublasStatus_t, operation: impl FnOnce() -> String) -> Result<(), DeviceError> {
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        problem => Err(DeviceError::new(operation(), format!("{problem:?}"))),
    }
}

/// An open library on one device.
pub(super) struct Library {
    pub(super) handle: sys::cublasLtHandle_t,
    pub(super) version: usize,
}

// SAFETY: NVIDIA documents that a handle may be used from several threads at once.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    pub(super) fn open(device: &Device) -> Result<Self, DeviceError> {
        // SAFETY: this only tries to load the library by its usual names. Without it every other call panics.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::new("opening cuBLASLt", "libcublasLt is not there").hint(
                "install the CUDA libraries, or add the folder of libcublasLt.so (of the nvidia-cublas wheel, say) to LD_LIBRARY_PATH",
            ));
        }
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle; the context is the current one.
        check(unsafe { sys::cublasLtCreate(&raw mut handle) }, || "opening cuBLASLt".to_owned())?;
        // SAFETY: the library is loaded.
        let version = unsafe { sys::cublasLtGetVersion() };
        Ok(Self { handle, version })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle was created once and is destroyed once.
        let _ = unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

/// What cuBLASLt is told about one product. It is column-major: there `y` is `[out, rows]`, the transpose of the
/// weights times `x`.
pub(super) struct Problem {
    operation: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
}

// SAFETY: descriptors are plain host memory without ties to a thread.
unsafe impl Send for Problem {}

impl Problem {
    /// The product of `shape` for `rows` rows.
    pub(super) fn new(shape: &GemmShape, rows: usize, multiprocessors: Option<u32>) -> Result<Self, DeviceError> {
        use std::ptr::null_mut;
        // What was created is destroyed with it, also when a later step fails.
        let mut problem = Self { operation: null_mut(), w: null_mut(), x: null_mut(), y: null_mut() };
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let (bf16, f32) = (sys::cudaDataType_t::CUDA_R_16BF, sys::cudaDataType_t::CUDA_R_32F);
        // SAFETY: the pointer is to a live descriptor.
        let status = unsafe { sys::cublasLtMatmulDescCreate(&raw mut problem.operation, compute, f32) };
        check(status, || "creating a product's descriptor".to_owned())?;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        problem.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, cublasOperation_t::CUBLAS_OP_T as i32)?;
        if shape.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            problem.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
        }
        if let Some(count) = multiprocessors {
            problem.set(Attribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, count as i32)?;
        }
        let output = match shape.output {
            Output::Bf16 => bf16,
            Output::F32 => f32,
        };
        for (layout, kind, (height, width), stride) in [
            (&raw mut problem.w, bf16, (shape.inner, shape.out), shape.w_stride),
            (&raw mut problem.x, bf16, (shape.inner, rows), shape.x_stride),
            (&raw mut problem.y, output, (shape.out, rows), shape.y_stride),
        ] {
            // SAFETY: the pointer is to a live layout.
            let status =
                unsafe { sys::cublasLtMatrixLayoutCreate(layout, kind, height as u64, width as u64, stride as i64) };
            check(status, || format!("describing a matrix of {height} x {width}"))?;
        }
        Ok(problem)
    }

    fn set<T: Copy>(&mut self, name: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<(), DeviceError> {
        // SAFETY: the descriptor lives and the value has the size that is given, which is that of the attribute.
        let status = unsafe {
            sys::cublasLtMatmulDescSetAttribute(self.operation, name, (&raw const value).cast(), size_of::<T>())
        };
        check(status, || format!("setting {name:?}"))
    }

    /// Where the bias lies, from now on.
    pub(super) fn set_bias(&mut self, bias: Address) -> Result<(), DeviceError> {
        self.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.0)
    }

    /// At most `count` algorithms that need at most `workspace` bytes, the presumably best first.
    ///
    /// Of the ways to split the inner dimension only that over the workspace is let in: each part writes its own f32
    /// sums there, and a second pass adds them in a fixed order.
    pub(super) fn candidates(
        &self,
        library: &Library,
        workspace: usize,
        count: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, DeviceError> {
        let mut preference = std::ptr::null_mut();
        // SAFETY: the pointer is to a live preference, which is destroyed below.
        let status = unsafe { sys::cublasLtMatmulPreferenceCreate(&raw mut preference) };
        check(status, || "creating a preference".to_owned())?;
        let ask = || {
            use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
            let set = |name, value: *const c_void, bytes| {
                // SAFETY: the preference lives, and the value has this many bytes.
                let status = unsafe { sys::cublasLtMatmulPreferenceSetAttribute(preference, name, value, bytes) };
                check(status, || format!("setting {name:?}"))
            };
            let bytes = workspace as u64;
            set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const bytes).cast(), 8)?;
            let reduction = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const reduction).cast(), 4)?;
            let alignment = GemmShape::ALIGNMENT;
            for name in [
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                set(name, (&raw const alignment).cast(), 4)?;
            }
            // SAFETY: all zero is a value of this plain struct.
            let mut results = vec![unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() }; count];
            let mut found = 0;
            // SAFETY: handle, descriptors and preference live; the array has `count` elements.
            let status = unsafe {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    library.handle,
                    self.operation,
                    self.w,
                    self.x,
                    self.y,
                    self.y,
                    preference,
                    count as i32,
                    results.as_mut_ptr(),
                    &raw mut found,
                )
            };
            check(status, || "asking for algorithms".to_owned())?;
            results.truncate(found.max(0) as usize);
            let usable = |result: &sys::cublasLtMatmulHeuristicResult_t| {
                result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= workspace
            };
            Ok(results.into_iter().filter(usable).map(|result| result.algo).collect())
        };
        let found = ask();
        // SAFETY: created above, destroyed once.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(preference) };
        found
    }

    /// Bytes of workspace that `algorithm` needs; an error where it does not fit this product or this device.
    pub(super) fn workspace(
        &self,
        library: &Library,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> Result<usize, DeviceError> {
        // SAFETY: all zero is a value of this plain struct.
        let mut result = unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() };
        // SAFETY: handle, descriptors and algorithm live.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                library.handle,
                self.operation,
                self.w,
                self.x,
                self.y,
                self.y,
                algorithm,
                &raw mut result,
            )
        };
        check(status, || "checking an algorithm".to_owned())?;
        Ok(result.workspaceSize)
    }

    /// Queues `y = x . w^T + beta y`.
    ///
    /// # Safety
    /// As for [`super::Gemms::run`]; `workspace` has `bytes` bytes, which is what the algorithm needs or more.
    pub(super) unsafe fn multiply(
        &self,
        library: &Library,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        operands: &super::Operands,
        accumulate: bool,
        (workspace, bytes): (Address, usize),
        stream: sys::cudaStream_t,
    ) -> sys::cublasStatus_t {
        let (alpha, beta) = (1.0_f32, f32::from(u8::from(accumulate)));
        let pointer = |address: Address| address.0 as *mut c_void;
        // SAFETY: handle, descriptors and algorithm live; scalars are read during the call; the caller answers for
        // device memory.
        unsafe {
            sys::cublasLtMatmul(
                library.handle,
                self.operation,
                (&raw const alpha).cast(),
                pointer(operands.w),
                self.w,
                pointer(operands.x),
                self.x,
                (&raw const beta).cast(),
                pointer(operands.y),
                self.y,
                pointer(operands.y),
                self.y,
                algorithm,
                pointer(workspace),
                bytes,
                stream,
            )
        }
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        for layout in [self.w, self.x, self.y] {
            if !layout.is_null() {
                // SAFETY: created once, destroyed once.
                let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(layout) };
            }
        }
        if !self.operation.is_null() {
            // SAFETY: as above.
            let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.operation) };
        }
    }
}
