//! An io_uring that owns the memory of its transfers: the only unsafe code of this crate.
#![allow(unsafe_code)]

use super::{Memory, Transfer};
use io_uring::{IoUring, opcode, types::Fd};
use oasis_core::memory::HostBytes;
use std::io::{self, PipeReader, Read};
use std::os::fd::AsRawFd;

/// Tag of the poll that a [bell](Ring::set_bell) answers.
const BELL: u64 = u64::MAX;

/// At most `depth` transfers in flight, each with a tag of type `T`.
///
/// Transfers that are in flight when the ring is dropped are leaked, as the kernel may still use their memory.
pub struct Ring<T> {
    ring: IoUring,
    slots: Vec<Option<(Transfer, T)>>,
    /// Indices of empty slots.
    free: Vec<usize>,
    bell: Option<PipeReader>,
    /// The bell is being listened to.
    is_armed: bool,
    /// The bell was heard and nobody asked since.
    has_rung: bool,
}

impl<T> Ring<T> {
    /// A ring for `depth` transfers.
    ///
    /// # Errors
    /// When the kernel has no io_uring or forbids it.
    pub fn new(depth: usize) -> io::Result<Self> {
        // One more for the bell.
        let ring = IoUring::new(depth as u32 + 1)?;
        let slots = (0..depth).map(|_| None).collect();
        Ok(Self { ring, slots, free: (0..depth).rev().collect(), bell: None, is_armed: false, has_rung: false })
    }

    /// Any byte in the pipe ends a [`wait`](Ring::wait).
    pub fn set_bell(&mut self, bell: PipeReader) {
        self.bell = Some(bell);
    }

    /// Whether the bell was heard since the last call.
    pub fn has_rung(&mut self) -> bool {
        std::mem::take(&mut self.has_rung)
    }

    /// Transfers in flight.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Queues a transfer; it begins with the next [`submit`](Ring::submit) or [`wait`](Ring::wait).
    ///
    /// # Panics
    /// When `depth` transfers are in flight.
    pub fn start(&mut self, transfer: Transfer, tag: T) {
        let slot = self.free.pop().expect("at most `depth` transfers are started");
        // Put in place first: from here on it is not touched before the kernel is done.
        let (transfer, _) = self.slots[slot].insert((transfer, tag));
        let Transfer { file, offset, memory, moved } = transfer;
        let (file, offset) = (Fd(file.as_raw_fd()), *offset + *moved as u64);
        // What is longer is moved in parts.
        let length = |bytes: &[u8]| bytes.len().min(1 << 30) as u32;
        let entry = match memory {
            Memory::Read(pages) => {
                let bytes = &mut pages.bytes_mut()[*moved..];
                opcode::Read::new(file, bytes.as_mut_ptr(), length(bytes)).offset(offset).build()
            }
            Memory::Write(pages) => {
                let bytes = &pages.bytes()[*moved..];
                opcode::Write::new(file, bytes.as_ptr(), length(bytes)).offset(offset).build()
            }
        };
        // SAFETY: `slots` keeps the memory in place, the file open and both untouched until the kernel has reported the
        // end; memory that is read into has no other owner, memory that is written from is never changed. A ring that
        // is dropped earlier leaks them.
        unsafe { self.push(&entry.user_data(slot as u64)) };
    }

    /// Begins what was queued and waits until a transfer ends or the bell rings.
    ///
    /// # Errors
    /// When the kernel refuses the ring itself, which a sound one never meets.
    pub fn wait(&mut self) -> io::Result<()> {
        if let Some(bell) = self.bell.as_ref().filter(|_| !self.is_armed) {
            // POLLIN
            let entry = opcode::PollAdd::new(Fd(bell.as_raw_fd()), 1).build().user_data(BELL);
            // SAFETY: A poll refers to no memory.
            unsafe { self.push(&entry) };
            self.is_armed = true;
        }
        sound(self.ring.submit_and_wait(1))
    }

    /// Begins what was queued.
    ///
    /// # Errors
    /// As those of [`wait`](Ring::wait).
    pub fn submit(&mut self) -> io::Result<()> {
        sound(self.ring.submit())
    }

    /// A transfer that ended, with the bytes that were moved.
    pub fn finished(&mut self) -> Option<(Transfer, T, io::Result<usize>)> {
        loop {
            let entry = self.ring.completion().next()?;
            if entry.user_data() == BELL {
                (self.is_armed, self.has_rung) = (false, true);
                // Readable, so this does not wait.
                let _ = self.bell.as_mut().map(|bell| bell.read(&mut [0; 64]));
                continue;
            }
            let slot = entry.user_data() as usize;
            let (transfer, tag) = self.slots[slot].take().expect("the kernel reports each transfer once");
            self.free.push(slot);
            let moved = entry.result();
            let result = usize::try_from(moved).map_err(|_| io::Error::from_raw_os_error(-moved));
            return Some((transfer, tag, result));
        }
    }

    /// # Safety
    /// What the entry refers to must stay valid, and be used by nobody else, until the kernel has reported its end.
    unsafe fn push(&mut self, entry: &io_uring::squeue::Entry) {
        // SAFETY: The caller's promise.
        unsafe { self.ring.submission().push(entry) }.expect("the queue has a place for every slot and the bell");
    }
}

/// What the kernel answers, without the errors that pass.
fn sound(answer: io::Result<usize>) -> io::Result<()> {
    match answer {
        Ok(_) => Ok(()),
        // A signal; or the kernel wants us to take what has ended before it begins more.
        Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy) => Ok(()),
        // The kernel is short of memory.
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            std::thread::sleep(std::time::Duration::from_millis(1));
            Ok(())
        }
        Err(error) => Err(error),
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        self.slots.drain(..).for_each(std::mem::forget);
    }
}
