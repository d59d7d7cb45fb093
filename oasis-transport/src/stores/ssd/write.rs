//! Write-behind: records on their way from memory to the disk.

use super::folder::RequestFile;
use super::record::Layout;
use super::state::{RecordName, State};
use crate::disk::{self, Completion, Device, Memory, Op, Pages, Transfer};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use tokio::sync::Notify;

/// State that writes in flight change too.
#[derive(Default)]
pub(super) struct Shared {
    state: RwLock<State>,
    /// A write failed.
    pub failure: Notify,
}

impl Shared {
    pub fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_written(&self, name: RecordName) {
        let mut state = self.write();
        state.problem = None;
        let done = state.live(name).and_then(|live| live.dirty.remove(&name.record));
        drop(state);
        // Memory and place are given back without the lock.
        drop(done);
    }

    fn has_failed(&self, name: RecordName, problem: String) {
        let mut state = self.write();
        if state.live(name).is_none() {
            return;
        }
        state.failed.push(name);
        if state.problem.is_none() {
            tracing::warn!("{problem}; what was to be written stays in memory and is tried again");
        }
        state.problem = Some(problem);
        drop(state);
        self.failure.notify_waiters();
    }

    /// Tries the failed writes again.
    pub fn retry(self: &Arc<Self>, device: &Arc<dyn Device>) {
        if self.read().failed.is_empty() {
            return;
        }
        let mut state = self.write();
        let failed = std::mem::take(&mut state.failed);
        let again = failed.into_iter().filter_map(|name| {
            let live = state.live(name)?;
            let (pages, file) = (live.dirty.get(&name.record)?.pages.clone(), live.file.as_ref().ok()?.clone());
            Some(self.op(file, &live.layout, name, pages))
        });
        let again = again.collect();
        drop(state);
        disk::submit(device, again);
    }

    /// The write of a record.
    pub fn op(self: &Arc<Self>, file: Arc<RequestFile>, layout: &Layout, name: RecordName, pages: Arc<Pages>) -> Op {
        let transfer = Transfer::new(file.file.clone(), layout.record_offset(name.record), Memory::Write(pages));
        Op { transfer, completion: Box::new(Written { shared: Arc::downgrade(self), file, name }) }
    }
}

struct Written {
    shared: Weak<Shared>,
    file: Arc<RequestFile>,
    name: RecordName,
}

impl Completion for Written {
    fn is_wanted(&self) -> bool {
        !self.file.is_released.load(Ordering::Relaxed)
    }

    fn complete(self: Box<Self>, transfer: Transfer, result: io::Result<usize>) {
        let Some(shared) = self.shared.upgrade() else { return };
        match result {
            Ok(_) => shared.has_written(self.name),
            Err(error) => {
                let problem = format!("{}, offset {}: {error}", self.file.path.display(), transfer.offset);
                shared.has_failed(self.name, problem);
            }
        }
    }
}
