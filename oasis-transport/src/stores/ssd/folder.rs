//! The folder of a store: one file a request, those that an earlier run left behind, and a lock.

use super::record::{Layout, Owner, decode_file, encode_file};
use crate::disk::{self, Device, PAGE, PagePool};
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::RequestId;
use oasis_core::memory::HostBytes;
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::SystemTime;

/// KV of a request of an earlier run.
#[derive(Debug, Clone, PartialEq)]
pub struct Leftover {
    /// Tells it from all others in the folder, also from those of the same request id.
    pub generation: u64,
    /// Its request in that run.
    pub request: RequestId,
    /// Shape of its KV.
    pub geometry: KvGeometry,
    /// Blocks of a layer that were reserved.
    pub blocks: usize,
    /// Bytes of its file.
    pub bytes: u64,
}

impl Leftover {
    pub(super) fn owner(&self) -> Owner {
        Owner { request: self.request.0, generation: self.generation }
    }

    pub(super) fn layout(&self) -> Layout {
        Layout { geometry: self.geometry, blocks: self.blocks }
    }
}

/// The file of a live request.
pub(super) struct RequestFile {
    pub file: Arc<File>,
    pub path: PathBuf,
    pub owner: Owner,
    /// The request is gone: nothing needs to be written any more.
    pub is_released: AtomicBool,
}

/// The folder. One store at a time has it open.
pub(super) struct Folder {
    path: PathBuf,
    /// It was made by this store, which takes it away again when nothing is left in it.
    is_new: bool,
    /// Locked as long as it is open.
    lock: File,
    janitor: Option<Sender<Chore>>,
    thread: Option<JoinHandle<()>>,
}

enum Chore {
    /// Large files take a while to go, so nobody waits for it.
    Remove(Arc<RequestFile>),
    /// Answers when all before is done.
    Report(SyncSender<()>),
}

impl Folder {
    /// Opens a folder, made where there is none.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when another store has it open.
    pub fn open(path: &Path) -> io::Result<Self> {
        let is_new = !path.exists();
        std::fs::create_dir_all(path)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(path.join("lock"))?;
        lock.try_lock()?;
        let (janitor, chores) = channel();
        let thread = std::thread::Builder::new().name("oasis-ssd-janitor".to_owned()).spawn(move || {
            for chore in chores {
                match chore {
                    Chore::Remove(file) => remove(&file.path),
                    Chore::Report(reply) => drop(reply.send(())),
                }
            }
        })?;
        Ok(Self { path: path.to_owned(), is_new, lock, janitor: Some(janitor), thread: Some(thread) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that the file system has left.
    pub fn free_bytes(&self) -> io::Result<u64> {
        let status = rustix::fs::statvfs(&self.path)?;
        Ok(status.f_bavail.saturating_mul(status.f_frsize))
    }

    fn file(&self, owner: Owner) -> PathBuf {
        self.path.join(format!("{:016x}-{:016x}.kv", owner.request, owner.generation))
    }

    /// Makes the file of a request, with all of its space.
    pub fn create(&self, device: &dyn Device, owner: Owner, layout: &Layout) -> io::Result<Arc<RequestFile>> {
        let path = self.file(owner);
        let file = device.create(&path, layout.file_bytes())?;
        let mut head = PagePool::new(0).take(PAGE);
        encode_file(owner, layout, head.bytes_mut());
        file.write_all_at(head.bytes(), 0).inspect_err(|_| remove(&path))?;
        Ok(Arc::new(RequestFile { file: Arc::new(file), path, owner, is_released: AtomicBool::new(false) }))
    }

    /// Opens a file of an earlier run.
    pub fn reopen(&self, device: &dyn Device, owner: Owner) -> io::Result<Arc<RequestFile>> {
        let path = self.file(owner);
        let file = disk::open(OpenOptions::new().read(true).write(true), &path, device.is_direct())?;
        Ok(Arc::new(RequestFile { file: Arc::new(file), path, owner, is_released: AtomicBool::new(false) }))
    }

    /// Takes the file of a request away, soon.
    pub fn remove(&self, file: Arc<RequestFile>) {
        file.is_released.store(true, Ordering::Relaxed);
        self.chore(Chore::Remove(file));
    }

    /// Waits until what was to be removed has gone.
    pub fn tidy(&self) {
        let (reply, done) = sync_channel(1);
        self.chore(Chore::Report(reply));
        // An error only when the janitor is gone, and then nothing is left to wait for.
        let _ = done.recv();
    }

    fn chore(&self, chore: Chore) {
        let janitor = self.janitor.as_ref().expect("the janitor lives as long as the folder");
        if janitor.send(chore).is_err() {
            tracing::error!("{}: the thread that removes files has gone", self.path.display());
        }
    }

    /// Takes the file of an earlier run away, now.
    pub fn remove_leftover(&self, leftover: &Leftover) {
        remove(&self.file(leftover.owner()));
    }

    /// Files of an earlier run, the longest unused first. Those without a sound head are taken away.
    pub fn leftovers(&self) -> io::Result<VecDeque<Leftover>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "kv") {
                continue;
            }
            let head = read_head(&path)?.filter(|(_, (owner, _))| self.file(*owner) == path);
            let Some((modified, (owner, layout))) = head else {
                tracing::info!("{}: expected the head of a request's file, found none; removed", path.display());
                remove(&path);
                continue;
            };
            let Owner { request, generation } = owner;
            let leftover = Leftover {
                generation,
                request: RequestId(request),
                geometry: layout.geometry,
                blocks: layout.blocks,
                bytes: layout.file_bytes(),
            };
            found.push((modified, leftover));
        }
        found.sort_by_key(|(modified, leftover)| (*modified, leftover.generation));
        Ok(found.into_iter().map(|(_, leftover)| leftover).collect())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(self.janitor.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if self.is_new && std::fs::read_dir(&self.path).is_ok_and(|files| files.count() == 1) {
            // Only the lock is left; whoever waits for it finds no folder and makes one.
            let _ = std::fs::remove_file(self.path.join("lock"));
            let _ = std::fs::remove_dir(&self.path);
        }
        let _ = self.lock.unlock();
    }
}

fn read_head(path: &Path) -> io::Result<Option<(SystemTime, (Owner, Layout))>> {
    let file = File::open(path)?;
    let about = file.metadata()?;
    let mut head = vec![0; PAGE];
    match file.read_exact_at(&mut head, 0) {
        Ok(()) => {
            Ok(decode_file(&head, about.len()).map(|head| (about.modified().unwrap_or(SystemTime::UNIX_EPOCH), head)))
        }
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!("{}: expected to remove it, found {error}", path.display());
    }
}

/// Reads all of a file; the checksums of every record that holds a whole block.
pub(super) fn recover(file: &RequestFile, layout: &Layout) -> io::Result<Vec<Option<Vec<u64>>>> {
    let mut pages = PagePool::new(0).take(layout.record_bytes());
    (0..layout.records())
        .map(|record| {
            file.file.read_exact_at(pages.bytes_mut(), layout.record_offset(record))?;
            Ok(layout.decode(file.owner, record, pages.bytes()))
        })
        .collect()
}
