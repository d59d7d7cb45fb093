//! Streams, events and graphs.

use super::error::Check;
use super::{Device, DeviceError};
use crate::kernels::Address;
use cudarc::driver::{CudaEvent, CudaStream, result, sys};
use std::sync::Arc;

/// Which work goes first where streams compete for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// After everything else.
    Low,
    /// Between.
    Middle,
    /// Before everything else.
    High,
}

/// The device's numbers for priorities, of which the lowest number goes first.
pub(super) struct PriorityRange {
    low: i32,
    high: i32,
}

/// Asks the device that the thread is bound to.
pub(super) fn priority_range() -> Result<PriorityRange, DeviceError> {
    let (low, high) = result::stream::get_priority_range().check(|| "asking for the range of priorities")?;
    Ok(PriorityRange { low, high })
}

impl PriorityRange {
    pub(super) fn of(&self, priority: Priority) -> i32 {
        match priority {
            Priority::Low => self.low,
            Priority::Middle => (self.low + self.high) / 2,
            Priority::High => self.high,
        }
    }
}

/// A queue of work. Dropping it does not wait: what the work uses must outlive it.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    stream: Arc<CudaStream>,
    /// Who owns the stream, where it is one of a part of the device.
    owner: Option<Arc<dyn Send + Sync>>,
}

impl Stream {
    pub(super) fn new(device: &Device, priority: Priority) -> Result<Self, DeviceError> {
        device.bind()?;
        let priority = priority_range()?.of(priority);
        let stream = device.context.new_stream_with_priority(priority).check(|| "creating a stream")?;
        Ok(Self { device: device.clone(), stream, owner: None })
    }

    /// A stream that `owner` destroys.
    ///
    /// # Safety
    /// The stream is one of the device's and lives as long as its owner.
    pub(super) unsafe fn of(device: &Device, stream: sys::CUstream, owner: Arc<dyn Send + Sync>) -> Self {
        // SAFETY: the owner is kept beside it.
        let stream = unsafe { device.context.wrap_borrowed_stream(stream) };
        Self { device: device.clone(), stream, owner: Some(owner) }
    }

    /// Whether it belongs to a part of the device.
    pub(super) fn is_part(&self) -> bool {
        self.owner.is_some()
    }

    /// Waits until all work of the stream is done.
    ///
    /// # Errors
    /// [`DeviceError`] of any work before.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.stream.synchronize().check(|| "waiting for a stream")
    }

    /// Records `event` after the work so far.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn record(&self, event: &Event) -> Result<(), DeviceError> {
        event.0.record(&self.stream).check(|| "recording an event")
    }

    /// Records `event` after the work so far; in a capture, anew at each launch of the graph, to be read afterwards.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn record_in_graph(&self, event: &Event) -> Result<(), DeviceError> {
        self.device.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives; the answer has a place.
        unsafe { sys::cuStreamIsCapturing(self.handle(), &raw mut status) }
            .result()
            .check(|| "asking whether a stream is captured")?;
        // An event outside a capture may not be recorded as external to one.
        let flags = match status {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => 1,
            _ => 0,
        };
        // SAFETY: stream and event live; the event is owned by whoever owns the graph.
        unsafe { sys::cuEventRecordWithFlags(event.0.cu_event(), self.handle(), flags) }
            .result()
            .check(|| "recording an event")
    }

    /// Lets the work to come wait for `event`.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        self.stream.wait(&event.0).check(|| "waiting for an event")
    }

    /// Queues a copy of `bytes` bytes; either side may be device memory or pinned host memory.
    ///
    /// # Safety
    /// Both ranges are valid until the copy is done, and nothing else touches the destination meanwhile. A range of host
    /// memory lies within one chunk of its [`PinnedBuffer`](super::PinnedBuffer).
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub unsafe fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: the caller answers for both ranges.
        unsafe { sys::cuMemcpyAsync(to.0, from.0, bytes, self.handle()) }.result().check(|| "queueing a copy")
    }

    /// Queues a fill of `bytes` bytes of device memory.
    ///
    /// # Safety
    /// The range is valid until the fill is done, and nothing else touches it meanwhile.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub unsafe fn fill(&self, to: Address, byte: u8, bytes: usize) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: the caller answers for the range.
        unsafe { sys::cuMemsetD8Async(to.0, byte, bytes, self.handle()) }.result().check(|| "queueing a fill")
    }

    /// Captures what `work` queues, on this stream and on those that wait for it and are waited for again, as a graph.
    ///
    /// # Errors
    /// The error of `work`, or [`DeviceError`] from the driver; the stream can be used again either way.
    pub fn capture(&self, work: impl FnOnce() -> Result<(), DeviceError>) -> Result<Graph, DeviceError> {
        self.device.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        unsafe { result::stream::begin_capture(self.stream.cu_stream(), mode) }.check(|| "beginning a capture")?;
        let done = work();
        // SAFETY: the capture that was begun above is ended here, whatever came between.
        let graph = unsafe { result::stream::end_capture(self.stream.cu_stream()) };
        done?;
        let graph = graph.check(|| "ending a capture")?;
        let mut executable = std::ptr::null_mut();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        // SAFETY: the graph was just captured and is destroyed below, once.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, flags.0.into()) };
        // SAFETY: an executable graph does not refer to the graph that it was made from.
        let destroyed = unsafe { sys::cuGraphDestroy(graph) };
        status.result().check(|| "instantiating a graph")?;
        let graph = Graph { device: self.device.clone(), executable };
        destroyed.result().check(|| "destroying a captured graph")?;
        Ok(graph)
    }

    /// The device.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }
}

/// A point in a stream's work.
pub struct Event(CudaEvent);

impl Event {
    pub(super) fn new(device: &Device) -> Result<Self, DeviceError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        device.context.new_event(flags).check(|| "creating an event").map(Self)
    }

    /// Whether the work before it is done; true for an event that was never recorded.
    ///
    /// # Errors
    /// [`DeviceError`] of the work before.
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        self.0.context().bind_to_thread().check(|| "binding the device's context")?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.0.cu_event()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => status.result().check(|| "asking for an event").map(|()| true),
        }
    }

    /// Waits until the work before it is done.
    ///
    /// # Errors
    /// [`DeviceError`] of the work before.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.0.synchronize().check(|| "waiting for an event")
    }

    /// Microseconds from this event to `end`; waits for both.
    ///
    /// # Errors
    /// [`DeviceError`] when one was never recorded, or of the work before.
    pub fn micros_until(&self, end: &Event) -> Result<f64, DeviceError> {
        self.0.elapsed_ms(&end.0).check(|| "reading two events").map(|ms| f64::from(ms) * 1e3)
    }
}

/// Captured work that is launched as one.
pub struct Graph {
    device: Device,
    executable: sys::CUgraphExec,
}

// SAFETY: an executable graph may be used from any thread that binds the context, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Queues the work on `stream`.
    ///
    /// # Safety
    /// All memory that the captured launches use is still there, and stays until they are done.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: graph and stream live; the caller answers for the memory.
        unsafe { sys::cuGraphLaunch(self.executable, stream.handle()) }.result().check(|| "launching a graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the executable was created by `capture` and is destroyed once; the driver waits for launches.
            unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}
