//! Registered memory, lent out in buffers.

use crate::ranges::{ALIGN, Ranges, rounded};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Alignment of a region: registration works on pages.
const PAGE: usize = 4096;

/// Zeroed memory that is cut into disjoint ranges. A region lives until its engine has taken it off the network *and*
/// the last buffer is gone.
pub(crate) struct Region {
    allocation: *mut u8,
    layout: Layout,
    /// First byte, at a page.
    base: *mut u8,
    len: usize,
    ranges: Mutex<Ranges>,
    freed: Notify,
    /// Who waits for room, in turn.
    turn: tokio::sync::Mutex<()>,
}

// SAFETY: `allocation` and `base` point to memory that the region owns. What is in it is reached through `Buffer` and
// `Word` only, whose ranges never overlap.
unsafe impl Send for Region {}
// SAFETY: as above; the ranges are behind a lock.
unsafe impl Sync for Region {}

impl Region {
    /// `len` zero bytes at least; the system gives pages when they are first touched. `None` when it has not as many.
    pub fn new(len: usize) -> Option<Arc<Self>> {
        let len = rounded(len);
        // A small alignment, rounded up by hand: a large one would have the allocator write every zero.
        let layout = Layout::from_size_align(len.checked_add(PAGE)?, 16).ok()?;
        // SAFETY: the size is above 0.
        let allocation = unsafe { alloc_zeroed(layout) };
        if allocation.is_null() {
            return None;
        }
        // SAFETY: at most a page further, and there is one more than `len`.
        let base = unsafe { allocation.add(allocation.align_offset(PAGE)) };
        let ranges = Mutex::new(Ranges::new(len));
        let (freed, turn) = (Notify::new(), tokio::sync::Mutex::default());
        Some(Arc::new(Self { allocation, layout, base, len, ranges, freed, turn }))
    }

    pub fn base(&self) -> *mut u8 {
        self.base
    }

    pub fn len(&self) -> usize {
        self.len
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn take(self: &Arc<Self>, len: usize) -> Option<Buffer> {
        let start = self.ranges().take(len)?;
        Some(Buffer { region: self.clone(), start, len })
    }

    pub async fn take_when_free(self: &Arc<Self>, len: usize) -> Option<Buffer> {
        if rounded(len) > self.len {
            return None;
        }
        let _turn = self.turn.lock().await;
        loop {
            // Asked for before the attempt, so that nothing that is freed meanwhile goes unseen.
            let freed = self.freed.notified();
            if let Some(buffer) = self.take(len) {
                return Some(buffer);
            }
            freed.await;
        }
    }

    pub fn used(&self) -> usize {
        self.len - self.ranges().free_bytes()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; no buffer is left, since each holds the region.
        unsafe { dealloc(self.allocation, self.layout) };
    }
}

/// A part of a pool's memory that belongs to its holder alone; it goes back to the pool when it is dropped.
///
/// An engine that reads into a buffer holds it meanwhile, and gives it back, or drops it, only when nothing can be written
/// to it any more.
pub struct Buffer {
    region: Arc<Region>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Bytes from the pool's first to the buffer's, a multiple of 64.
    pub fn offset(&self) -> u64 {
        self.start as u64
    }

    /// What is in it: zeros, or whatever an earlier holder left.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies in the region and is this buffer's alone; nobody writes while it is borrowed.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.len) }
    }

    /// The same, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.len) }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        // SAFETY: a range lies within its region.
        unsafe { self.region.base.add(self.start) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.region.ranges().give_back(self.start, self.len);
        self.region.freed.notify_waiters();
    }
}

/// A number that peers can read while its owner changes it.
pub struct Word(Buffer);

impl Word {
    pub(crate) fn new(buffer: Buffer, value: u64) -> Self {
        let word = Self(buffer);
        word.set(value);
        word
    }

    /// Bytes from the pool's first to the word's.
    pub fn offset(&self) -> u64 {
        self.0.offset()
    }

    /// Changes it, little-endian: whoever reads later sees this value, or a later one.
    pub fn set(&self, value: u64) {
        // SAFETY: eight bytes at a multiple of ALIGN that live as long as `self` and are only ever used as this number.
        let word = unsafe { AtomicU64::from_ptr(self.0.pointer().cast()) };
        word.store(value.to_le(), Ordering::SeqCst);
    }
}

const _: () = assert!(ALIGN.is_multiple_of(align_of::<AtomicU64>()) && PAGE.is_multiple_of(ALIGN));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_lie_side_by_side_and_come_back() {
        let region = Region::new(4 * ALIGN).unwrap();
        let mut buffers: Vec<Buffer> = (0..4).map(|_| region.take(ALIGN).unwrap()).collect();
        assert!(region.take(1).is_none());
        for (index, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.offset(), (index * ALIGN) as u64);
            buffer.bytes_mut().fill(index as u8);
        }
        assert!(buffers.iter().enumerate().all(|(index, buffer)| buffer.bytes() == [index as u8; ALIGN]));
        let word = Word::new(buffers.remove(0), 0x0102);
        assert_eq!(word.0.bytes()[..8], 0x0102_u64.to_le_bytes());
        drop((word, buffers));
        assert_eq!(region.used(), 0);
    }

    #[tokio::test]
    async fn who_waits_for_room_gets_it_in_turn() {
        let region = Region::new(4 * ALIGN).unwrap();
        assert!(region.take_when_free(5 * ALIGN).await.is_none());
        let held = region.take(3 * ALIGN).unwrap();
        let (large, small) = (region.clone(), region.clone());
        let large = tokio::spawn(async move { large.take_when_free(4 * ALIGN).await.unwrap().offset() });
        tokio::task::yield_now().await;
        // Would fit now, but comes second.
        let small = tokio::spawn(async move { small.take_when_free(ALIGN).await.unwrap().offset() });
        tokio::task::yield_now().await;
        assert!(!large.is_finished() && !small.is_finished());
        drop(held);
        assert_eq!((large.await.unwrap(), small.await.unwrap()), (0, 0));
    }
}
