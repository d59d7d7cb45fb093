//! Times of the kernels that steps and prefills consist of, each beside the least time that its bytes or operations need.
//!
//! Data are random. Where a launch reads less than the L2 cache holds, launches take turns at several copies.

mod attention;
mod gather;
mod linear;
mod prefill;
mod scan;
mod select;

pub use attention::DecodeAttention;
pub use gather::{GatherBench, GatherBeside};
pub use scan::SummaryScan;

use crate::compile::Compiler;
use crate::device::{Device, DeviceError, Priority, Stream};
use serde::Serialize;

/// What cuBLAS reaches with large bf16 products on an H200, in operations a second.
pub const TENSOR_FLOPS: f64 = 790e12;

/// Attention of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Heads {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads of a KV head.
    pub group: usize,
}

impl Heads {
    fn name(&self) -> String {
        let Self { head_dim, kv_heads, group } = self;
        format!("{kv_heads} KV heads of {group} x {head_dim}")
    }
}

/// A kernel's time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelTime {
    /// Kernel and shape.
    pub kernel: String,
    /// Microseconds of a launch, the median of several.
    pub micros: f64,
    /// Bytes or operations over the ceiling of what they cross; `None` where a launch is the floor.
    pub floor_micros: Option<f64>,
    /// Floor over time.
    pub ratio: Option<f64>,
    /// The rate, or what else there is to say.
    pub figure: String,
}

impl KernelTime {
    /// A time and its floor.
    pub fn new(kernel: impl Into<String>, micros: f64, floor_micros: Option<f64>, figure: impl Into<String>) -> Self {
        let ratio = floor_micros.map(|floor| floor / micros);
        Self { kernel: kernel.into(), micros, floor_micros, ratio, figure: figure.into() }
    }
}

/// Median time in microseconds of one of `launches` launches, captured as one graph.
///
/// # Safety
/// What is launched is valid for as long as this runs.
///
/// # Errors
/// Those of `launch`, or [`DeviceError`] from the driver.
pub unsafe fn micros(
    device: &Device,
    stream: &Stream,
    launches: usize,
    launch: impl Fn(usize) -> Result<(), DeviceError>,
) -> Result<f64, DeviceError> {
    let graph = stream.capture(|| (0..launches).try_for_each(&launch))?;
    let (start, end) = (device.event()?, device.event()?);
    let mut times = Vec::new();
    for _ in 0..9 {
        stream.record(&start)?;
        // SAFETY: the caller's.
        unsafe { graph.launch(stream)? };
        stream.record(&end)?;
        stream.synchronize()?;
        times.push(start.micros_until(&end)? / launches as f64);
    }
    // The first two warm up.
    times.drain(..2);
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Measures kernels on one device.
pub struct KernelBench {
    device: Device,
    compiler: Compiler,
    stream: Stream,
    /// Bytes a second that a plain kernel reads: the ceiling of what memory binds.
    pub memory_read: f64,
}

impl KernelBench {
    /// Measures the memory's ceiling.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver, or without NVRTC.
    pub fn new(device: &Device) -> Result<Self, DeviceError> {
        Ok(Self {
            device: device.clone(),
            compiler: device.compiler()?,
            stream: device.stream(Priority::Middle)?,
            memory_read: super::memory_read(device)?,
        })
    }

    /// CTAs that keep the memory busy: two a multiprocessor.
    pub fn full_grid(&self) -> u32 {
        2 * self.device.facts.multiprocessors
    }

    /// Copies of `bytes` bytes that together are more than the L2 cache holds.
    fn copies(bytes: usize) -> usize {
        (256_usize << 20).div_ceil(bytes.max(1)).clamp(2, 32)
    }

    /// [`micros`] on this bench's stream.
    ///
    /// # Safety
    /// As there.
    unsafe fn micros(
        &self,
        launches: usize,
        launch: impl Fn(usize) -> Result<(), DeviceError>,
    ) -> Result<f64, DeviceError> {
        // SAFETY: the caller's.
        unsafe { micros(&self.device, &self.stream, launches, launch) }
    }

    /// The time of a kernel that is bound by `bytes` of device memory.
    fn of_bytes(&self, kernel: impl Into<String>, micros: f64, bytes: f64) -> KernelTime {
        let floor = bytes / self.memory_read * 1e6;
        KernelTime::new(kernel, micros, Some(floor), format!("{:.3} TB/s", bytes / micros / 1e6))
    }
}
