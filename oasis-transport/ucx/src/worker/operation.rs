//! A batch of reads: one answer, one deadline.

use super::endpoint::Endpoint;
use super::words;
use crate::error::ReadError;
use crate::memory::{Buffer, Region};
use crate::settings::Segment;
use crate::sys::{self, Posted, Status, Ucp, Zeroed};
use std::cell::Cell;
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Most reads of a batch that UCX has at once.
const WINDOW: usize = 1024;

/// What callbacks of one batch report to. Each read in flight holds it.
struct Batch {
    in_flight: Cell<usize>,
    /// First failure.
    status: Cell<Status>,
    free: unsafe extern "C" fn(*mut c_void),
}

unsafe extern "C" fn completed(request: *mut c_void, status: Status, batch: *mut c_void) {
    // SAFETY: `post` left one count of the batch with this read; UCX calls once, on the worker's thread.
    let batch = unsafe { Rc::from_raw(batch.cast::<Batch>()) };
    // SAFETY: here and no sooner: a request that is freed before it is complete has no callback any more.
    unsafe { (batch.free)(request) };
    batch.in_flight.set(batch.in_flight.get() - 1);
    if status != sys::OK && batch.status.get() == sys::OK {
        batch.status.set(status);
    }
}

/// Reads of one peer's pool into one buffer. It holds the buffer until nothing can be written to it any more.
pub struct Operation {
    peer: u64,
    segments: Vec<Segment>,
    /// Of `segments`, how many have been posted.
    next: usize,
    buffer: Option<Buffer>,
    start: Instant,
    limit: Duration,
    reply: Option<oneshot::Sender<Result<Buffer, ReadError>>>,
    memh: usize,
    batch: Option<LocalBatch>,
}

/// Made and used on the worker's thread only.
struct LocalBatch(Rc<Batch>);

// SAFETY: an operation is sent to the worker's thread before `advance` makes the batch there, and stays.
unsafe impl Send for LocalBatch {}

impl Operation {
    pub fn new(
        peer: u64,
        segments: Vec<Segment>,
        buffer: Buffer,
        start: Instant,
        limit: Duration,
        reply: oneshot::Sender<Result<Buffer, ReadError>>,
    ) -> Self {
        let (buffer, reply) = (Some(buffer), Some(reply));
        Self { peer, segments, next: 0, buffer, start, limit, reply, memh: 0, batch: None }
    }

    pub fn peer(&self) -> u64 {
        self.peer
    }

    pub fn region(&self) -> &Arc<Region> {
        self.buffer().region()
    }

    fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("given back with the answer")
    }

    pub fn answer(&mut self, answer: Result<Buffer, ReadError>) {
        if let Some(reply) = self.reply.take() {
            // Whoever asked may have gone; a buffer in the answer goes back to its pool.
            let _ = reply.send(answer);
        }
    }

    /// To be called once, before [`advance`](Self::advance): the buffer lies in memory registered as `memh`.
    pub fn start(&mut self, memh: sys::ucp_mem_h) {
        self.memh = memh as usize;
    }

    /// Goes on; tells whether anything has changed, and whether the operation stays.
    pub fn advance(&mut self, ucp: &Ucp, endpoint: Option<&mut Endpoint>) -> (bool, bool) {
        let free = ucp.ucp_request_free;
        let fresh = || LocalBatch(Rc::new(Batch { in_flight: Cell::new(0), status: Cell::new(sys::OK), free }));
        let batch = self.batch.get_or_insert_with(fresh).0.clone();
        // Endpoints that reads still need are there: they are forgotten only when they are closed.
        let Some(endpoint) = endpoint else {
            self.answer(Err(ReadError::Closed));
            return (true, batch.in_flight.get() > 0);
        };
        let mut changed = false;
        if endpoint.is_open() && batch.status.get() == sys::OK {
            changed |= self.post(ucp, endpoint, &batch);
            if batch.in_flight.get() == 0 && self.next == self.segments.len() && batch.status.get() == sys::OK {
                let buffer = self.buffer.take().expect("answered once");
                self.answer(Ok(buffer));
                return (true, false);
            }
            if self.start.elapsed() >= self.limit {
                endpoint.close(ucp, ReadError::TimedOut(self.limit));
            } else if batch.status.get() != sys::OK {
                endpoint.close(ucp, ReadError::Lost(words(ucp, batch.status.get())));
            }
        }
        match endpoint.refusal(ucp) {
            None => (changed, true),
            Some(reason) => {
                // What closed the endpoint may be another operation's deadline.
                let is_ours = self.start.elapsed() >= self.limit;
                let error = match reason {
                    ReadError::TimedOut(_) if is_ours => ReadError::TimedOut(self.limit),
                    reason => reason,
                };
                self.answer(Err(error));
                // The buffer is free when every callback has come and the close is complete.
                let is_safe = batch.in_flight.get() == 0 && !endpoint.is_open() && !endpoint.is_closing();
                (is_safe, !is_safe)
            }
        }
    }

    /// Posts reads up to the window; tells whether there was one.
    fn post(&mut self, ucp: &Ucp, endpoint: &Endpoint, batch: &Rc<Batch>) -> bool {
        let before = self.next;
        let base = self.buffer().pointer();
        while self.next < self.segments.len() && batch.in_flight.get() < WINDOW && batch.status.get() == sys::OK {
            let Segment { local, remote, len } = self.segments[self.next];
            self.next += 1;
            let mut param = sys::ucp_request_param::zeroed();
            param.op_attr_mask = sys::OP_CALLBACK | sys::OP_USER_DATA | sys::OP_MEMH | sys::OP_MULTI_SEND;
            param.cb = Some(completed);
            param.user_data = Rc::into_raw(batch.clone()).cast_mut().cast();
            param.memh = self.memh as *mut c_void;
            batch.in_flight.set(batch.in_flight.get() + 1);
            // SAFETY: the engine checked the segment against the buffer, which this operation holds until the read ended.
            let posted = unsafe { endpoint.get(ucp, base.add(local), len, remote, &param) };
            let failure = match posted {
                Posted::Pending => continue,
                Posted::Done => sys::OK,
                Posted::Failed(status) => status,
            };
            // SAFETY: no callback comes, so the count that was left for it is taken back.
            drop(unsafe { Rc::from_raw(param.user_data.cast::<Batch>()) });
            batch.in_flight.set(batch.in_flight.get() - 1);
            batch.status.set(failure);
        }
        self.next > before
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let in_flight = self.batch.as_ref().map_or(0, |batch| batch.0.in_flight.get());
        if in_flight > 0 {
            // Only at the end of an engine that UCX does not let go of its reads: better lost than written to.
            tracing::error!("{in_flight} reads of UCX did not end: their buffer is not used again");
            std::mem::forget(self.buffer.take());
        }
    }
}
