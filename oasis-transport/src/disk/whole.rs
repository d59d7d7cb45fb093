//! Transfers that move all of their memory or fail.

use super::{Completion, Device, Memory, Op, PAGE, Transfer};
use std::io;
use std::sync::{Arc, Weak};

/// Starts transfers whose completions are told of all the memory or of an error: one that moved a part goes on.
pub(crate) fn submit(device: &Arc<dyn Device>, ops: Vec<Op>) {
    let whole = |Op { transfer, completion }| {
        let device = Arc::downgrade(device);
        Op { transfer, completion: Box::new(Whole { device, completion }) }
    };
    device.submit(ops.into_iter().map(whole).collect());
}

struct Whole {
    device: Weak<dyn Device>,
    completion: Box<dyn Completion>,
}

impl Completion for Whole {
    fn is_wanted(&self) -> bool {
        self.completion.is_wanted()
    }

    fn complete(self: Box<Self>, mut transfer: Transfer, result: io::Result<usize>) {
        let (len, before) = (transfer.memory.len(), transfer.moved);
        let (moved, was_interrupted) = match result {
            Ok(moved) if before + moved >= len => return self.completion.complete(transfer, Ok(len)),
            Ok(moved) => (moved, false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (0, true),
            Err(error) => return self.completion.complete(transfer, Err(error)),
        };
        // Direct I/O goes on at a page.
        transfer.moved = (before + moved) / PAGE * PAGE;
        let goes_on = transfer.moved > before || was_interrupted;
        match self.device.upgrade().filter(|_| goes_on) {
            Some(device) => device.submit(vec![Op { transfer, completion: self }]),
            None => {
                let (kind, done) = match transfer.memory {
                    Memory::Read(_) => (io::ErrorKind::UnexpectedEof, "read"),
                    Memory::Write(_) => (io::ErrorKind::WriteZero, "written"),
                };
                let problem = format!("{} of {len} bytes {done} at offset {}", before + moved, transfer.offset);
                self.completion.complete(transfer, Err(io::Error::new(kind, problem)));
            }
        }
    }
}
