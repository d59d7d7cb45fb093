//! Finds out whether a device works in a folder.

use super::{Completion, Device, Memory, Op, PAGE, PagePool, Transfer};
use oasis_core::memory::HostBytes;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// A device that takes longer for one page does not work.
const PATIENCE: Duration = Duration::from_secs(5);

/// Writes a page to a file `probe` in `folder` and reads it back.
///
/// # Errors
/// What the device or the file system says; an error of its own when other bytes or none come back.
pub(crate) fn probe(device: &Arc<dyn Device>, folder: &Path) -> io::Result<()> {
    let path = folder.join("probe");
    // One of a run that was killed.
    let _ = std::fs::remove_file(&path);
    let file = Arc::new(device.create(&path, PAGE as u64)?);
    let pool = PagePool::new(0);
    let run = |memory| {
        let (reply, answer) = channel();
        let transfer = Transfer::new(file.clone(), 0, memory);
        super::submit(device, vec![Op { transfer, completion: Box::new(Reply(reply)) }]);
        let (transfer, result) = (answer.recv_timeout(PATIENCE))
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no answer for a page"))?;
        result.map(|_| transfer.memory)
    };
    let page: Vec<u8> = (0..PAGE).map(|i| (i % 251) as u8).collect();
    let result = run(Memory::Write(Arc::new(pool.block(&page)))).and_then(|_| run(Memory::Read(pool.take(PAGE))));
    let _ = std::fs::remove_file(&path);
    match result? {
        Memory::Read(pages) if pages.bytes() == page => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a page came back with other bytes than were written")),
    }
}

struct Reply(Sender<(Transfer, io::Result<usize>)>);

impl Completion for Reply {
    fn is_wanted(&self) -> bool {
        true
    }

    fn complete(self: Box<Self>, transfer: Transfer, result: io::Result<usize>) {
        // Nobody listens after the patience has run out.
        let _ = self.0.send((transfer, result));
    }
}
