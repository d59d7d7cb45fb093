//! Disks: page-aligned memory, and devices that move it to and from files without blocking the caller.
//!
//! Memory that a device moves belongs to the device until the operating system is done with it, whatever becomes of
//! those who wait for it.

#[cfg(target_os = "linux")]
mod probe;
mod queue;
#[cfg(target_os = "linux")]
pub mod ring;
mod threads;
#[cfg(target_os = "linux")]
mod uring;
mod whole;

#[cfg(target_os = "linux")]
pub(crate) use {probe::probe, uring::Uring};
pub(crate) use {threads::Threads, whole::submit};

use crate::slab::{Block, Slab};
use bytemuck::{Pod, Zeroable};
use oasis_core::memory::HostBytes;
use std::fs::{File, OpenOptions};
use std::io;
use std::sync::Arc;

/// Unit of direct I/O in bytes: offsets, lengths and addresses are multiples of it.
///
/// Devices with sectors of 512 bytes take it as well, and most of them keep pages of this size inside.
pub const PAGE: usize = 4096;

/// Memory of one page.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(4096))]
pub struct Page([u8; PAGE]);

/// Recycled [`Pages`].
pub type PagePool = Slab<Page>;

/// Page-aligned memory.
pub type Pages = Block<Page>;

/// Memory of a transfer; its length is a multiple of [`PAGE`].
pub enum Memory {
    /// To be filled.
    Read(Pages),
    /// To be written; others may read it meanwhile.
    Write(Arc<Pages>),
}

impl Memory {
    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "no transfer is empty")]
    pub fn len(&self) -> usize {
        match self {
            Self::Read(pages) => pages.bytes().len(),
            Self::Write(pages) => pages.bytes().len(),
        }
    }
}

/// A read or a write of one file.
pub struct Transfer {
    /// File.
    pub file: Arc<File>,
    /// Where in the file, in bytes; a multiple of [`PAGE`].
    pub offset: u64,
    /// The bytes.
    pub memory: Memory,
    /// Bytes at the front that were moved before; a multiple of [`PAGE`].
    pub moved: usize,
}

impl Transfer {
    /// A transfer of all of `memory`.
    pub fn new(file: Arc<File>, offset: u64, memory: Memory) -> Self {
        Self { file, offset, memory, moved: 0 }
    }
}

/// Who is told of the end of a transfer.
pub(crate) trait Completion: Send {
    /// Whether anybody still waits; a transfer that nobody wants need not begin.
    fn is_wanted(&self) -> bool;

    /// Takes the memory back, with the bytes that were moved after [`Transfer::moved`]. Called on a thread of the
    /// device; must neither block nor panic. Never called when the device is dropped before the transfer begins.
    fn complete(self: Box<Self>, transfer: Transfer, result: io::Result<usize>);
}

/// A transfer with the one who is told.
pub(crate) struct Op {
    pub transfer: Transfer,
    pub completion: Box<dyn Completion>,
}

/// Moves memory to and from files. Dropping it ends what has begun and begins nothing more.
pub(crate) trait Device: Send + Sync {
    /// Whether files are opened past the page cache.
    fn is_direct(&self) -> bool;

    /// Starts transfers. Reads go before writes; the order is free otherwise. A transfer may move less than all of its
    /// memory, as `read(2)` does.
    fn submit(&self, ops: Vec<Op>);

    /// Creates a file and sets `len` bytes aside for it, which read as zeros.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] where the file system has no room.
    fn create(&self, path: &std::path::Path, len: u64) -> io::Result<File> {
        let file = open(OpenOptions::new().read(true).write(true).create_new(true), path, self.is_direct())?;
        allocate(&file, len).inspect_err(|_| drop(std::fs::remove_file(path)))?;
        Ok(file)
    }
}

/// Opens a file, past the page cache where `direct`.
pub(crate) fn open(options: &mut OpenOptions, path: &std::path::Path, direct: bool) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    if direct {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = direct;
    options.open(path)
}

fn allocate(file: &File, len: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len) {
        Err(rustix::io::Errno::OPNOTSUPP) => {}
        result => return Ok(result?),
    }
    // Without a promise of space: a write may find the disk full.
    file.set_len(len)
}
