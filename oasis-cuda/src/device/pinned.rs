//! Page-locked host memory.

use super::error::Check;
use super::{Device, DeviceError};
use crate::kernels::Address;
use cudarc::driver::sys;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pages are this large or smaller.
const PAGE: usize = 2 << 20;

/// Page-locked host memory that the device addresses directly, at the same address as the host.
///
/// The host's cores read it at full speed: it is not write-combined.
pub struct PinnedBuffer {
    device: Device,
    memory: NonNull<u8>,
    layout: Layout,
    bytes: usize,
    /// Starts of the chunks that are pinned.
    pinned: Vec<usize>,
}

// SAFETY: the memory is owned and has no ties to a thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Bytes that are pinned by one call. One copy of the copy engine must lie within one chunk; kernels need not care.
    pub const CHUNK: usize = 256 << 20;

    pub(super) fn new(device: &Device, bytes: usize, progress: &(dyn Fn(usize) + Sync)) -> Result<Self, DeviceError> {
        let layout = Layout::from_size_align(bytes.max(1), PAGE)
            .map_err(|error| DeviceError::new(format!("allocating {bytes} bytes of host memory"), error))?;
        // SAFETY: the layout is not empty.
        let Some(memory) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
        let mut buffer = Self { device: device.clone(), memory, layout, bytes, pinned: Vec::new() };
        buffer.pin(progress)?;
        Ok(buffer)
    }

    /// Touches and pins the memory, a chunk at a time in a few threads: a single one needs minutes for hundreds of GB.
    fn pin(&mut self, progress: &(dyn Fn(usize) + Sync)) -> Result<(), DeviceError> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (pinned, failure) = (Mutex::new(Vec::new()), Mutex::new(None));
        let start = self.memory.as_ptr() as usize;
        let work = || {
            loop {
                let chunk = next.fetch_add(Self::CHUNK, Ordering::Relaxed);
                if chunk >= self.bytes {
                    return;
                }
                let length = Self::CHUNK.min(self.bytes - chunk);
                let pin = || -> Result<(), DeviceError> {
                    self.device.bind()?;
                    // SAFETY: the chunk is within the allocation, and every chunk belongs to one thread.
                    unsafe { pin_chunk((start + chunk) as *mut u8, length) }
                };
                match pin() {
                    Ok(()) => pinned.lock().expect("nothing panics while it is held").push(chunk),
                    Err(error) => {
                        next.fetch_max(self.bytes, Ordering::Relaxed);
                        failure.lock().expect("nothing panics while it is held").get_or_insert(error);
                        return;
                    }
                }
                progress(done.fetch_add(length, Ordering::Relaxed) + length);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(work);
            }
        });
        self.pinned = pinned.into_inner().expect("nothing panicked");
        match failure.into_inner().expect("nothing panicked") {
            None => Ok(()),
            Some(error) => {
                let (done, bytes) = (done.into_inner(), self.bytes);
                Err(DeviceError::new(format!("pinning {bytes} bytes of host memory, {done} of them done"), error)
                    .hint("less memory, or a higher limit of locked memory (ulimit -l, the container's memory limit)"))
            }
        }
    }

    /// Parts of `bytes` bytes from byte `start` on that a copy engine takes one at a time: offset from `start`, and length.
    pub fn parts(&self, start: usize, bytes: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let end = ((start + at) / Self::CHUNK + 1) * Self::CHUNK - start;
            let part = (at, end.min(bytes) - at);
            at += part.1;
            (part.1 > 0).then_some(part)
        })
    }

    /// The bytes. The device may be writing where transfers to the host are under way.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory was zeroed chunk by chunk, or written since.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.bytes) }
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is exclusive on the host.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) }
    }

    /// Where the device finds it.
    pub fn address(&self) -> Address {
        Address(self.memory.as_ptr() as u64)
    }
}

/// Zeroes and pins `length` bytes at `start` and checks that the device sees them at the same address.
///
/// # Safety
/// The range is owned by the caller alone.
unsafe fn pin_chunk(start: *mut u8, length: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller owns the range.
    unsafe { start.write_bytes(0, length) };
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: the range is allocated, and unregistered before it is freed.
    unsafe { sys::cuMemHostRegister_v2(start.cast(), length, flags) }.result().check(|| "registering host memory")?;
    let mut seen = 0;
    // SAFETY: the range was just registered with a mapping.
    unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut seen, start.cast(), 0) }
        .result()
        .check(|| "mapping host memory")?;
    if seen != start as u64 {
        return Err(DeviceError::new("mapping host memory", "the device sees it at another address than the host"));
    }
    Ok(())
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let idle = self.device.synchronize();
        for chunk in &self.pinned {
            // SAFETY: the chunk was registered once, and the device has been waited for.
            unsafe { sys::cuMemHostUnregister(self.memory.as_ptr().add(*chunk).cast()) };
        }
        // A device that was lost may still be writing: its memory is left to the end of the process.
        if idle.is_ok() {
            // SAFETY: the memory was allocated with this layout and is no longer registered.
            unsafe { dealloc(self.memory.as_ptr(), self.layout) };
        }
    }
}
