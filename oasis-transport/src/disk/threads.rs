//! A device of plain positioned reads and writes on blocking threads: works on every file system.

use super::queue::Queue;
use super::{Device, Memory, Op, Transfer};
use oasis_core::memory::HostBytes;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most threads: more of them only wait for each other.
const MOST_THREADS: usize = 16;

/// How long transfers in flight may hold up the end of a device. A disk that takes longer keeps its thread, which owns
/// all that it needs.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads and writes through the page cache.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    has_work: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Threads {
    /// A device with at most `depth` transfers in flight.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn new(depth: usize) -> io::Result<Self> {
        let depth = depth.min(MOST_THREADS);
        let shared = Arc::new(Shared { queue: Mutex::new(Queue::new(depth)), has_work: Condvar::new() });
        let mut device = Self { shared, threads: Vec::new() };
        for i in 0..depth {
            let shared = device.shared.clone();
            let thread = std::thread::Builder::new().name(format!("oasis-disk-{i}"));
            device.threads.push(thread.spawn(move || work(&shared))?);
        }
        Ok(device)
    }
}

impl Device for Threads {
    fn is_direct(&self) -> bool {
        false
    }

    fn submit(&self, ops: Vec<Op>) {
        self.shared.lock().push(ops);
        self.shared.has_work.notify_all();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.lock().stop();
        self.shared.has_work.notify_all();
        join(self.threads.drain(..));
    }
}

/// Waits for threads to end, not for ever, and not for the one that asks.
pub(super) fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    let end = Instant::now() + PATIENCE;
    for thread in threads.into_iter().filter(|t| t.thread().id() != std::thread::current().id()) {
        while !thread.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(100));
        }
        if thread.is_finished() && thread.join().is_err() {
            tracing::error!("a thread of the disk panicked");
        }
    }
}

fn work(shared: &Shared) {
    let mut queue = shared.lock();
    loop {
        if let Some((Op { mut transfer, completion }, is_write)) = queue.pop() {
            drop(queue);
            let result = run(&mut transfer);
            shared.lock().ended(is_write);
            shared.has_work.notify_one();
            completion.complete(transfer, result);
            queue = shared.lock();
        } else if queue.is_stopped() {
            return;
        } else {
            queue = shared.has_work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn run(transfer: &mut Transfer) -> io::Result<usize> {
    let Transfer { file, offset, memory, moved } = transfer;
    let offset = *offset + *moved as u64;
    match memory {
        Memory::Read(pages) => file.read_at(&mut pages.bytes_mut()[*moved..], offset),
        Memory::Write(pages) => file.write_at(&pages.bytes()[*moved..], offset),
    }
}
