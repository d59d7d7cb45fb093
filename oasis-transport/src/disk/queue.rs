//! Transfers that wait for their turn.

use super::{Memory, Op};
use std::collections::VecDeque;

/// Reads before writes, within a depth. Writes take at most a quarter of it; while some wait, one place is theirs, so
/// that neither holds the other up for long.
pub(super) struct Queue {
    reads: VecDeque<Op>,
    writes: VecDeque<Op>,
    /// Most transfers at a time, at least 2.
    depth: usize,
    /// Reads that were taken out and have not ended.
    reading: usize,
    /// The same for writes.
    writing: usize,
    stopped: bool,
}

impl Queue {
    pub fn new(depth: usize) -> Self {
        assert!(depth >= 2, "a read and a write need a place each");
        Self { reads: VecDeque::new(), writes: VecDeque::new(), depth, reading: 0, writing: 0, stopped: false }
    }

    /// Appends `ops`; nothing is taken any more once the queue was stopped.
    pub fn push(&mut self, ops: Vec<Op>) {
        for op in ops.into_iter().filter(|_| !self.stopped) {
            match op.transfer.memory {
                Memory::Read(_) => self.reads.push_back(op),
                Memory::Write(_) => self.writes.push_back(op),
            }
        }
    }

    /// The next transfer to begin, with whether it is a write; [`Queue::ended`] must follow.
    pub fn pop(&mut self) -> Option<(Op, bool)> {
        let wanted = |ops: &mut VecDeque<Op>| {
            while let Some(op) = ops.pop_front() {
                if op.completion.is_wanted() {
                    return Some(op);
                }
            }
            None
        };
        let most_reads = self.depth - usize::from(!self.writes.is_empty());
        if self.reading < most_reads
            && self.reading + self.writing < self.depth
            && let Some(op) = wanted(&mut self.reads)
        {
            self.reading += 1;
            return Some((op, false));
        }
        let has_room = self.writing < (self.depth / 4).max(1) && self.reading + self.writing < self.depth;
        let op = if has_room { wanted(&mut self.writes)? } else { return None };
        self.writing += 1;
        Some((op, true))
    }

    /// Frees the place of a transfer that ended.
    pub fn ended(&mut self, is_write: bool) {
        *if is_write { &mut self.writing } else { &mut self.reading } -= 1;
    }

    /// Drops what has not begun.
    pub fn stop(&mut self) {
        self.stopped = true;
        self.reads.clear();
        self.writes.clear();
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Completion, PAGE, PagePool, Transfer};
    use std::fs::File;
    use std::io;
    use std::sync::Arc;

    struct Wanted(bool);

    impl Completion for Wanted {
        fn is_wanted(&self) -> bool {
            self.0
        }

        fn complete(self: Box<Self>, _transfer: Transfer, _result: io::Result<usize>) {}
    }

    fn op(is_write: bool, offset: u64, is_wanted: bool) -> Op {
        let pages = PagePool::new(0).take(PAGE);
        let memory = if is_write { Memory::Write(Arc::new(pages)) } else { Memory::Read(pages) };
        let file = Arc::new(File::open(env!("CARGO_MANIFEST_DIR")).unwrap());
        Op { transfer: Transfer::new(file, offset, memory), completion: Box::new(Wanted(is_wanted)) }
    }

    fn popped(queue: &mut Queue) -> Vec<(bool, u64)> {
        std::iter::from_fn(|| queue.pop()).map(|(op, is_write)| (is_write, op.transfer.offset)).collect()
    }

    #[test]
    fn reads_go_first_and_each_kind_keeps_a_place() {
        let mut queue = Queue::new(4);
        queue.push((0..5).flat_map(|offset| [op(true, offset, true), op(false, offset, true)]).collect());
        assert_eq!(popped(&mut queue), [(false, 0), (false, 1), (false, 2), (true, 0)]);
        queue.ended(false);
        assert_eq!(popped(&mut queue), [(false, 3)]);
        queue.ended(true);
        assert_eq!(popped(&mut queue), [(true, 1)]);
        (0..3).for_each(|_| queue.ended(false));
        assert_eq!(popped(&mut queue), [(false, 4)], "a quarter of the places is all that writes get");
    }

    #[test]
    fn what_nobody_wants_or_comes_too_late_never_begins() {
        let mut queue = Queue::new(8);
        queue.push(vec![op(false, 0, false), op(false, 1, true), op(true, 2, false)]);
        assert_eq!(popped(&mut queue), [(false, 1)]);
        queue.push(vec![op(false, 3, true)]);
        queue.stop();
        queue.push(vec![op(true, 4, true)]);
        assert_eq!(popped(&mut queue), []);
    }
}
