//! Reads of scattered entries, joined where they touch.

use super::folder::RequestFile;
use super::record::{Layout, checksum};
use crate::disk::{Completion, Memory, Op, PAGE, PagePool, Transfer};
use oasis_core::memory::{HostBytes, HostEntry};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc::UnboundedSender;

/// An entry that must come from the disk.
pub(super) struct Wanted {
    /// Its place in the answer.
    pub index: usize,
    pub file: Arc<RequestFile>,
    pub layout: Layout,
    pub record: usize,
    pub head: usize,
    /// What its bytes must add up to.
    pub checksum: u64,
}

impl Wanted {
    /// The entry in its file.
    fn bytes(&self) -> Range<u64> {
        let start = self.layout.record_offset(self.record) + self.layout.entry_offset(self.head) as u64;
        start..start + self.layout.geometry.entry_bytes() as u64
    }

    /// The entry's pages.
    fn pages(&self) -> Range<u64> {
        let (Range { start, end }, page) = (self.bytes(), PAGE as u64);
        start / page * page..end.next_multiple_of(page)
    }
}

/// One read: entries of one record whose pages touch.
pub(super) struct Read {
    pages: Range<u64>,
    pub entries: Vec<Wanted>,
}

/// Joins `wanted` to reads.
pub(super) fn join(mut wanted: Vec<Wanted>) -> Vec<Read> {
    wanted.sort_unstable_by_key(|w| (w.file.owner.generation, w.record, w.head));
    let mut reads: Vec<Read> = Vec::new();
    for entry in wanted {
        let pages = entry.pages();
        let last = reads.last_mut().filter(|read| {
            let before = &read.entries[0];
            before.file.owner == entry.file.owner && before.record == entry.record && pages.start <= read.pages.end
        });
        match last {
            Some(read) => {
                read.pages.end = pages.end;
                read.entries.push(entry);
            }
            None => reads.push(Read { pages, entries: vec![entry] }),
        }
    }
    reads
}

/// Reads whose ends are told together: waking the one who waits costs about as much as a read.
const TOLD_TOGETHER: usize = 16;

/// The transfers of `reads`, whose ends are told in parts, by number.
pub(super) fn ops(reads: &[Read], pool: &Arc<PagePool>, done: &UnboundedSender<Vec<Done>>) -> Vec<Op> {
    let mut ops = Vec::with_capacity(reads.len());
    for part in reads.chunks(TOLD_TOGETHER) {
        let ended = Mutex::new(Vec::with_capacity(part.len()));
        let part = Arc::new(Part { ended, len: part.len(), done: done.clone() });
        for _ in 0..part.len {
            let (number, part) = (ops.len(), part.clone());
            let Read { pages, entries } = &reads[number];
            let memory = Memory::Read(pool.take((pages.end - pages.start) as usize));
            let transfer = Transfer::new(entries[0].file.file.clone(), pages.start, memory);
            ops.push(Op { transfer, completion: Box::new(Reader { number, part }) });
        }
    }
    ops
}

impl Read {
    /// The entries out of the memory that was read, each with its place in the answer.
    ///
    /// # Errors
    /// Says which file returned something else than what was written.
    pub fn finish(self, memory: Memory, result: io::Result<usize>) -> Result<Vec<(usize, HostEntry)>, String> {
        let file = self.entries[0].file.clone();
        let at = |offset: u64| format!("{}, offset {offset}", file.path.display());
        result.map_err(|error| format!("{}: {error}", at(self.pages.start)))?;
        let Memory::Read(pages) = memory else { unreachable!("a read comes back as a read") };
        let pages = Arc::new(pages);
        let entry = |wanted: Wanted| {
            let Range { start, end } = wanted.bytes();
            let range = (start - self.pages.start) as usize..(end - self.pages.start) as usize;
            let bytes = &pages.bytes()[range.clone()];
            let found = checksum(bytes);
            if found != wanted.checksum {
                return Err(format!(
                    "{}: expected an entry with checksum {:016x}, found {found:016x}; the disk returned other bytes than \
                     were written",
                    at(start),
                    wanted.checksum
                ));
            }
            Ok((wanted.index, HostEntry { memory: pages.clone(), range }))
        };
        self.entries.into_iter().map(entry).collect()
    }
}

/// The end of a read: its number, its memory and how it went.
pub(super) type Done = (usize, Memory, io::Result<usize>);

struct Part {
    ended: Mutex<Vec<Done>>,
    len: usize,
    done: UnboundedSender<Vec<Done>>,
}

struct Reader {
    number: usize,
    part: Arc<Part>,
}

impl Completion for Reader {
    fn is_wanted(&self) -> bool {
        !self.part.done.is_closed()
    }

    fn complete(self: Box<Self>, transfer: Transfer, result: io::Result<usize>) {
        let mut ended = self.part.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.push((self.number, transfer.memory, result));
        if ended.len() == self.part.len {
            // Nobody listens any more when the fetch was given up; then the memory goes back to its pool here.
            let _ = self.part.done.send(std::mem::take(&mut ended));
        }
    }
}
