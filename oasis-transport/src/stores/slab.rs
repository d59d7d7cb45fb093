//! Recycled block buffers: allocated on first use, lent out under reference counts, reused once nobody holds them.

use bytemuck::{Pod, Zeroable};
use oasis_core::memory::HostBytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A cache line: the alignment of every buffer, enough for any element type and SIMD width.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

type Buffer = Box<[Line]>;

/// Free buffers by size. Memory returns to the operating system only when buffers of another size need the room.
pub(super) struct Slab {
    /// Bytes of live and free buffers that the slab tries not to exceed.
    capacity: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Free buffers by length in lines.
    free: HashMap<usize, Vec<Buffer>>,
    free_bytes: u64,
    /// Bytes lent out.
    live_bytes: u64,
}

impl Slab {
    pub fn new(capacity: u64) -> Arc<Self> {
        Arc::new(Self { capacity, state: Mutex::default() })
    }

    /// A block that holds a copy of `bytes`.
    pub fn block(self: &Arc<Self>, bytes: &[u8]) -> Block {
        let lines = bytes.len().div_ceil(size_of::<Line>());
        let recycled = self.take(lines);
        // Allocated outside the lock: the first touch of fresh memory is slow.
        let mut buffer = recycled.unwrap_or_else(|| bytemuck::zeroed_slice_box(lines));
        bytemuck::cast_slice_mut::<Line, u8>(&mut buffer)[..bytes.len()].copy_from_slice(bytes);
        Block { buffer, len: bytes.len(), slab: self.clone() }
    }

    fn take(&self, lines: usize) -> Option<Buffer> {
        let mut state = self.lock();
        let size = byte_size(lines);
        state.live_bytes += size;
        let recycled = state.free.get_mut(&lines).and_then(Vec::pop);
        if recycled.is_some() {
            state.free_bytes -= size;
        } else if state.live_bytes + state.free_bytes > self.capacity {
            state.free.clear();
            state.free_bytes = 0;
        }
        recycled
    }

    fn give_back(&self, buffer: Buffer) {
        let mut state = self.lock();
        let size = byte_size(buffer.len());
        state.live_bytes -= size;
        if state.live_bytes + state.free_bytes + size <= self.capacity {
            state.free_bytes += size;
            state.free.entry(buffer.len()).or_default().push(buffer);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn byte_size(lines: usize) -> u64 {
    (lines * size_of::<Line>()) as u64
}

/// One block in host memory; its buffer is recycled when the last holder drops it.
pub(super) struct Block {
    buffer: Buffer,
    /// Bytes in use.
    len: usize,
    slab: Arc<Slab>,
}

impl HostBytes for Block {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice::<Line, u8>(&self.buffer)[..self.len]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.slab.give_back(std::mem::take(&mut self.buffer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_reused_once_its_last_holder_is_gone() {
        let slab = Slab::new(1024);
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
        let slab = Slab::new(1024);
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
