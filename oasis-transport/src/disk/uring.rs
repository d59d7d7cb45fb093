//! A device on io_uring: one thread that owns the ring.

use super::queue::Queue;
use super::ring::Ring;
use super::{Completion, Device, Op, Transfer};
use std::io::{self, PipeWriter, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Direct I/O through io_uring.
pub(crate) struct Uring {
    shared: Arc<Shared>,
    bell: PipeWriter,
    driver: Option<JoinHandle<()>>,
}

struct Shared(Mutex<State>);

struct State {
    queue: Queue,
    /// The bell was rung and the driver has not answered.
    is_ringing: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Uring {
    /// A device with at most `depth` transfers in flight.
    ///
    /// # Errors
    /// When the kernel has no io_uring or forbids it.
    pub fn new(depth: usize) -> io::Result<Self> {
        let mut ring = Ring::new(depth)?;
        let (heard, bell) = io::pipe()?;
        ring.set_bell(heard);
        let shared = Arc::new(Shared(Mutex::new(State { queue: Queue::new(depth), is_ringing: false })));
        let thread = std::thread::Builder::new().name("oasis-uring".to_owned());
        let driver = thread.spawn({
            let shared = shared.clone();
            move || drive(ring, &shared)
        })?;
        Ok(Self { shared, bell, driver: Some(driver) })
    }

    fn ring_bell(&self, mut state: MutexGuard<'_, State>) {
        let is_ringing = std::mem::replace(&mut state.is_ringing, true);
        drop(state);
        if !is_ringing {
            // It fails only once the driver has gone, and then nothing is left to be done.
            let _ = (&self.bell).write(&[1]);
        }
    }
}

impl Device for Uring {
    fn is_direct(&self) -> bool {
        true
    }

    fn submit(&self, ops: Vec<Op>) {
        let mut state = self.shared.lock();
        state.queue.push(ops);
        self.ring_bell(state);
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.queue.stop();
        self.ring_bell(state);
        super::threads::join(self.driver.take());
    }
}

/// Who is told of the end, and whether it is a write.
type Tag = (Box<dyn Completion>, bool);

fn drive(mut ring: Ring<Tag>, shared: &Shared) {
    if let Err(error) = run(&mut ring, shared) {
        tracing::error!("io_uring: expected transfers to end, found {error}; the disk is given up");
        shared.lock().queue.stop();
    }
}

fn run(ring: &mut Ring<Tag>, shared: &Shared) -> io::Result<()> {
    let mut finished: Vec<(Transfer, Tag, io::Result<usize>)> = Vec::new();
    loop {
        let mut state = shared.lock();
        if ring.has_rung() {
            state.is_ringing = false;
        }
        for (_, (_, is_write), _) in &finished {
            state.queue.ended(*is_write);
        }
        while let Some((Op { transfer, completion }, is_write)) = state.queue.pop() {
            ring.start(transfer, (completion, is_write));
        }
        let is_over = state.queue.is_stopped() && ring.in_flight() == 0;
        drop(state);
        if !finished.is_empty() {
            // The disk works on while others are told.
            ring.submit()?;
            for (transfer, (completion, _), result) in finished.drain(..) {
                completion.complete(transfer, result);
            }
        }
        if is_over {
            return Ok(());
        }
        ring.wait()?;
        finished.extend(std::iter::from_fn(|| ring.finished()));
    }
}
