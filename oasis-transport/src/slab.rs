//! Recycled buffers: allocated on first use, lent out under reference counts, reused once nobody holds them.

use bytemuck::{Pod, Zeroable};
use oasis_core::memory::HostBytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A cache line: the alignment of ordinary buffers, enough for any element type and SIMD width.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct Line([u8; 64]);

/// Free buffers by size; `U` is the unit of their length and alignment. Memory returns to the operating system only when
/// buffers of another size need the room.
pub struct Slab<U = Line> {
    /// Bytes of live and free buffers that the slab tries not to exceed.
    capacity: u64,
    state: Mutex<State<U>>,
}

struct State<U> {
    /// Free buffers by length in units.
    free: HashMap<usize, Vec<Box<[U]>>>,
    free_bytes: u64,
    /// Bytes lent out.
    live_bytes: u64,
}

impl<U: Pod> Slab<U> {
    /// A slab that recycles as long as live and free buffers together stay below `capacity` bytes.
    pub fn new(capacity: u64) -> Arc<Self> {
        let state = State { free: HashMap::new(), free_bytes: 0, live_bytes: 0 };
        Arc::new(Self { capacity, state: Mutex::new(state) })
    }

    /// A buffer of `len` bytes. What is in it is arbitrary: whatever its last holder left.
    pub fn take(self: &Arc<Self>, len: usize) -> Block<U> {
        let units = len.div_ceil(size_of::<U>());
        let recycled = self.recycled(units);
        // Allocated outside the lock: the first touch of fresh memory is slow.
        let buffer = recycled.unwrap_or_else(|| bytemuck::zeroed_slice_box(units));
        Block { buffer, len, slab: self.clone() }
    }

    /// A buffer that holds a copy of `bytes`.
    pub fn block(self: &Arc<Self>, bytes: &[u8]) -> Block<U> {
        let mut block = self.take(bytes.len());
        block.bytes_mut().copy_from_slice(bytes);
        block
    }

    fn recycled(&self, units: usize) -> Option<Box<[U]>> {
        let mut state = self.lock();
        let size = byte_size::<U>(units);
        state.live_bytes += size;
        let recycled = state.free.get_mut(&units).and_then(Vec::pop);
        if recycled.is_some() {
            state.free_bytes -= size;
        } else if state.live_bytes + state.free_bytes > self.capacity {
            state.free.clear();
            state.free_bytes = 0;
        }
        recycled
    }

    fn lock(&self) -> MutexGuard<'_, State<U>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<U> Slab<U> {
    fn give_back(&self, buffer: Box<[U]>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let size = byte_size::<U>(buffer.len());
        state.live_bytes -= size;
        if state.live_bytes + state.free_bytes + size <= self.capacity {
            state.free_bytes += size;
            state.free.entry(buffer.len()).or_default().push(buffer);
        }
    }
}

fn byte_size<U>(units: usize) -> u64 {
    (units * size_of::<U>()) as u64
}

/// One buffer in host memory; it is recycled when the last holder drops it.
pub struct Block<U = Line> {
    buffer: Box<[U]>,
    /// Bytes in use.
    len: usize,
    slab: Arc<Slab<U>>,
}

impl<U: Pod> Block<U> {
    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut::<U, u8>(&mut self.buffer)[..self.len]
    }
}

impl<U: Pod + Send + Sync> HostBytes for Block<U> {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice::<U, u8>(&self.buffer)[..self.len]
    }
}

impl<U> Drop for Block<U> {
    fn drop(&mut self) {
        self.slab.give_back(std::mem::take(&mut self.buffer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_reused_once_its_last_holder_is_gone() {
        let slab = Slab::<Line>::new(1024);
        let first = Arc::new(slab.block(&[1; 100]));
        let address = first.bytes().as_ptr();
        let lease = first.clone();
        drop(first);
        assert_ne!(slab.block(&[2; 100]).bytes().as_ptr(), address, "a held buffer must not be reused");
        assert_eq!(lease.bytes(), [1; 100]);
        drop(lease);
        let again = [slab.block(&[3; 100]), slab.block(&[3; 100])];
        assert!(again.iter().any(|b| b.bytes().as_ptr() == address));
        assert!(again.iter().all(|b| b.bytes() == [3; 100] && b.bytes().as_ptr().cast::<Line>().is_aligned()));
    }

    #[test]
    fn free_buffers_of_another_size_make_room() {
        let slab = Slab::<Line>::new(1024);
        drop((0..8).map(|_| slab.block(&[0; 128])).collect::<Vec<_>>());
        assert_eq!(slab.lock().free_bytes, 1024);
        let large = slab.block(&[0; 512]);
        let state = slab.lock();
        assert_eq!((state.free_bytes, state.live_bytes), (0, 512));
        drop(state);
        drop(large);
        assert_eq!(slab.lock().live_bytes, 0);
    }
}
