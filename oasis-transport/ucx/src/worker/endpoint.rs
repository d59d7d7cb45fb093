//! A connection to a peer: open, closing, or closed with the reason.

use super::words;
use crate::descriptor::Descriptor;
use crate::error::ReadError;
use crate::sys::{self, Posted, Status, Ucp, Zeroed, posted};
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::null_mut;
use tokio::sync::oneshot;

pub struct Endpoint {
    state: State,
    ep: sys::ucp_ep_h,
    rkey: sys::ucp_rkey_h,
    base: u64,
    /// Set by UCX when it gives the peer up; at a fixed place until the endpoint is closed.
    failure: Box<Cell<Status>>,
    /// Why it is not open any more.
    reason: Option<ReadError>,
    /// Whoever wants it forgotten once it is closed.
    pub when_closed: Vec<oneshot::Sender<()>>,
}

enum State {
    Open,
    /// The request of the close.
    Closing(*mut c_void),
    Closed,
}

unsafe extern "C" fn failed(failure: *mut c_void, _ep: sys::ucp_ep_h, status: Status) {
    // SAFETY: `Endpoint::open` gave the address of its cell, which outlives the endpoint; UCX calls on the worker's thread.
    unsafe { &*failure.cast::<Cell<Status>>() }.set(status);
}

impl Endpoint {
    pub fn open(ucp: &Ucp, worker: sys::ucp_worker_h, descriptor: &Descriptor) -> Result<Self, ReadError> {
        let failure = Box::new(Cell::new(sys::OK));
        let mut params = sys::ucp_ep_params::zeroed();
        params.field_mask = sys::EP_REMOTE_ADDRESS | sys::EP_ERR_HANDLER | sys::EP_ERR_HANDLING_MODE;
        params.address = descriptor.worker_address.as_ptr().cast();
        params.err_mode = sys::ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(failed);
        params.err_handler.arg = (&raw const *failure).cast_mut().cast();
        let (mut ep, mut rkey) = (null_mut(), null_mut());
        // SAFETY: the worker is open. Address and key are those that another UCX of the same release has written, as far
        // as version and checksum can tell.
        let status = unsafe { (ucp.ucp_ep_create)(worker, &params, &mut ep) };
        if status != sys::OK {
            return Err(ReadError::Lost(words(ucp, status)));
        }
        let (base, state, when_closed) = (descriptor.base, State::Open, Vec::new());
        // SAFETY: as above; the endpoint is open.
        let status = unsafe { (ucp.ucp_ep_rkey_unpack)(ep, descriptor.remote_key.as_ptr().cast(), &mut rkey) };
        let mut endpoint = Self { state, ep, rkey, base, failure, reason: None, when_closed };
        if status != sys::OK {
            // Kept by nobody: the close has nothing to wait for, since nothing was posted.
            endpoint.rkey = null_mut();
            endpoint.close(ucp, ReadError::Closed);
            while endpoint.is_closing() {
                // SAFETY: the worker is open and this is its thread.
                unsafe { (ucp.ucp_worker_progress)(worker) };
                endpoint.advance(ucp);
            }
            return Err(ReadError::Lost(words(ucp, status)));
        }
        Ok(endpoint)
    }

    /// Why nothing can be read; `None` when something can.
    pub fn refusal(&self, ucp: &Ucp) -> Option<ReadError> {
        match self.failure.get() {
            _ if self.reason.is_some() => self.reason.clone(),
            sys::OK => None,
            status => Some(ReadError::Lost(words(ucp, status))),
        }
    }

    /// Posts a read of `len` bytes at `remote`, bytes from the peer's first, into `local`.
    ///
    /// # Safety
    /// `local` is `len` bytes of memory registered as `param` says, which nobody uses until the read has ended: at once
    /// unless the answer is [`Posted::Pending`], else when the callback of `param` has come.
    pub unsafe fn get(
        &self,
        ucp: &Ucp,
        local: *mut u8,
        len: usize,
        remote: u64,
        param: &sys::ucp_request_param,
    ) -> Posted {
        // SAFETY: the caller's promise; the endpoint is open, and the key is its.
        posted(unsafe { (ucp.ucp_get_nbx)(self.ep, local.cast(), len, self.base + remote, self.rkey, param) })
    }

    /// Closes by force: reads in flight are cancelled. Later reads are answered with `reason`, the first one given.
    pub fn close(&mut self, ucp: &Ucp, reason: ReadError) {
        self.reason.get_or_insert(reason);
        if !matches!(self.state, State::Open) {
            return;
        }
        let mut param = sys::ucp_request_param::zeroed();
        (param.op_attr_mask, param.flags) = (sys::OP_FLAGS, sys::EP_CLOSE_FORCE);
        // SAFETY: the endpoint is open, and not used after this.
        let answer = unsafe { (ucp.ucp_ep_close_nbx)(self.ep, &param) };
        match posted(answer) {
            Posted::Pending => self.state = State::Closing(answer),
            Posted::Done => self.closed(ucp),
            Posted::Failed(status) => {
                tracing::error!("UCX cannot close an endpoint: {}", words(ucp, status));
                self.closed(ucp);
            }
        }
    }

    fn closed(&mut self, ucp: &Ucp) {
        self.state = State::Closed;
        if !self.rkey.is_null() {
            // SAFETY: the key is destroyed once, when no read can use it any more.
            unsafe { (ucp.ucp_rkey_destroy)(self.rkey) };
            self.rkey = null_mut();
        }
    }

    /// Looks for failures, and for the end of a close; tells whether anything has changed.
    pub fn advance(&mut self, ucp: &Ucp) -> bool {
        match self.state {
            State::Open if self.failure.get() != sys::OK => {
                let reason = ReadError::Lost(words(ucp, self.failure.get()));
                self.close(ucp, reason);
                true
            }
            State::Closing(request) => {
                // SAFETY: the request is UCX's and lives until it is freed, once, when it is complete.
                unsafe {
                    if (ucp.ucp_request_check_status)(request) == sys::IN_PROGRESS {
                        return false;
                    }
                    (ucp.ucp_request_free)(request);
                }
                self.closed(ucp);
                true
            }
            State::Open | State::Closed => false,
        }
    }

    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open)
    }

    pub fn is_closing(&self) -> bool {
        matches!(self.state, State::Closing(_))
    }

    /// Whether it is closed and somebody wants it forgotten; those are told.
    pub fn is_forgotten(&mut self) -> bool {
        if !matches!(self.state, State::Closed) || self.when_closed.is_empty() {
            return false;
        }
        for reply in self.when_closed.drain(..) {
            // Who has gone needs no answer.
            let _ = reply.send(());
        }
        true
    }
}
