//! `ssd`: blocks in files, read past the page cache.

mod folder;
mod read;
mod record;
mod state;
mod store;
#[cfg(test)]
mod tests;
mod write;

pub use folder::Leftover;
pub use store::SsdStore;

use crate::disk::{self, Device, PAGE, Threads};
use folder::Folder;
use oasis_core::config::Bytes;
use oasis_core::memory::{KvStore, StoreSpec};
use oasis_core::policy::SpecError;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Keeps blocks on a disk, one file a request, its space set aside when the request is reserved.
///
/// Writes return once the block is in a buffer in memory and checked; the disk follows. A block whose write fails stays
/// in memory, readable, and is tried again. Reads fetch the pages of the wanted entries only, many at a time, and check
/// each entry against the checksum of what was put. Each operation ends at its deadline, whatever the disk does.
///
/// Files of an earlier run that did not end well are [leftovers](SsdStore::leftovers): they can be
/// [adopted](SsdStore::adopt), and go, the longest unused first, when room is needed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ssd {
    /// Folder of the files, made where there is none. One store at a time may use it.
    pub directory: PathBuf,
    /// Most bytes of all files, leftovers included.
    pub capacity: Bytes,
    /// Most bytes of blocks that wait in memory for the disk.
    pub write_buffer: Bytes,
    /// Most reads and writes in flight.
    pub queue_depth: usize,
    /// Most milliseconds that a `put` or a `fetch` waits for the disk.
    pub deadline_ms: u64,
    /// How files are read and written.
    pub io: SsdIo,
}

/// How files are read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SsdIo {
    /// `direct` where it works, else `plain` with a warning.
    Auto,
    /// Past the page cache (`O_DIRECT`) through io_uring.
    Direct,
    /// Through the page cache, on blocking threads.
    Plain,
}

impl Default for Ssd {
    fn default() -> Self {
        Self {
            directory: PathBuf::from("oasis-kv"),
            capacity: Bytes(64 << 30),
            write_buffer: Bytes(256 << 20),
            queue_depth: 64,
            deadline_ms: 10_000,
            io: SsdIo::Auto,
        }
    }
}

oasis_core::register! {
    kind: "ssd", about: "Blocks in files, read past the page cache through io_uring", device_code: false,
    impl StoreSpec for Ssd {
        fn build(&self) -> Result<Arc<dyn KvStore>, SpecError> {
            Ok(Arc::new(self.open()?))
        }
    }
}

impl Ssd {
    /// Opens the store, with all that it has beyond a [`KvStore`].
    ///
    /// # Errors
    /// Names the field that has an impossible value.
    pub fn open(&self) -> Result<SsdStore, SpecError> {
        let too_small = |field, value, hint: &str| Err(SpecError::new(field, "a size above 0", value).hint(hint));
        if self.capacity.0 == 0 {
            return too_small("capacity", 0, "every block of every request is kept here; 64GiB is the default");
        }
        if self.write_buffer.0 < PAGE as u64 {
            return Err(SpecError::new("write_buffer", "at least 4KiB", self.write_buffer)
                .hint("blocks wait here for the disk; 256MiB is the default"));
        }
        if !(2..=4096).contains(&self.queue_depth) {
            return Err(SpecError::new("queue_depth", "a number from 2 to 4096", self.queue_depth)
                .hint("64 keeps most disks busy"));
        }
        if self.deadline_ms == 0 {
            return too_small("deadline_ms", 0, "10000 is the default");
        }
        let folder = Folder::open(&self.directory).map_err(|error| self.no_folder(&error))?;
        let device = self.device(|| direct(self.queue_depth, &folder))?;
        self.open_on(folder, device)
    }

    fn open_on(&self, folder: Folder, device: Arc<dyn Device>) -> Result<SsdStore, SpecError> {
        let deadline = Duration::from_millis(self.deadline_ms);
        SsdStore::new(folder, device, self.capacity.0, self.write_buffer.0, deadline)
            .map_err(|error| self.no_folder(&error))
    }

    fn no_folder(&self, error: &io::Error) -> SpecError {
        let found = format!("{}: {error}", self.directory.display());
        if error.kind() == io::ErrorKind::WouldBlock {
            return SpecError::new("directory", "a folder that no other store has open", self.directory.display())
                .hint("give each process a folder of its own");
        }
        SpecError::new("directory", "a folder to write files to", found)
    }

    /// `direct` where it is wanted and works, else threads.
    fn device(&self, direct: impl FnOnce() -> io::Result<Arc<dyn Device>>) -> Result<Arc<dyn Device>, SpecError> {
        if self.io != SsdIo::Plain {
            match direct() {
                Ok(device) => return Ok(device),
                Err(error) if self.io == SsdIo::Direct => {
                    let found = format!("{}: {error}", self.directory.display());
                    return Err(SpecError::new("io", "a kernel and a file system with io_uring and O_DIRECT", found)
                        .hint("\"auto\" falls back to plain reads and writes"));
                }
                Err(error) => tracing::warn!(
                    "{}: expected io_uring and O_DIRECT, found {error}; the ssd store reads and writes through the page \
                     cache (io = \"plain\" silences this)",
                    self.directory.display()
                ),
            }
        }
        let threads = Threads::new(self.queue_depth);
        Ok(Arc::new(threads.map_err(|error| SpecError::new("queue_depth", "threads for the disk", error))?))
    }
}

#[cfg(target_os = "linux")]
fn direct(depth: usize, folder: &Folder) -> io::Result<Arc<dyn Device>> {
    let device: Arc<dyn Device> = Arc::new(disk::Uring::new(depth)?);
    disk::probe(&device, folder.path())?;
    Ok(device)
}

#[cfg(not(target_os = "linux"))]
fn direct(_depth: usize, _folder: &Folder) -> io::Result<Arc<dyn Device>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "an operating system without io_uring"))
}
