//! Shared parts of the end-to-end tests: real and synthetic models, prompts, references, executors.

pub mod drive;
pub mod gpu;
pub mod mixtures;
pub mod models;
pub mod moves;
pub mod nodes;
pub mod prompts;
pub mod references;
pub mod survivors;
pub mod synthetic;

// Plugins register themselves only where their crate is linked.
use oasis_policies as _;
use oasis_transport as _;

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Runs `work` on a thread of its own and waits for it: a test that hangs fails instead.
///
/// # Panics
/// When `work` panics, or has not ended after `limit`.
pub fn within<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = channel();
    let worker = std::thread::spawn(move || drop(done.send(work())));
    match result.recv_timeout(limit) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("no answer within {limit:?}: something hangs"),
        Err(RecvTimeoutError::Disconnected) => std::panic::resume_unwind(worker.join().expect_err("nothing was sent")),
    }
}
