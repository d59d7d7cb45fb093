//! Sleeping until UCX or a caller has something to do.

use std::time::Duration;

#[cfg(unix)]
mod system {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::io::{Read, Write};
    use std::os::fd::{BorrowedFd, RawFd};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    pub type Ear = UnixStream;

    pub struct Bell(UnixStream);

    pub struct Sleeper {
        ear: Ear,
        events: RawFd,
    }

    pub fn pair() -> std::io::Result<(Bell, Ear)> {
        let (ring, hear) = UnixStream::pair()?;
        ring.set_nonblocking(true)?;
        hear.set_nonblocking(true)?;
        Ok((Bell(ring), hear))
    }

    impl Bell {
        pub fn ring(&self) {
            // A full buffer has rung already; an engine that is gone needs no waking.
            let _ = (&self.0).write(&[1]);
        }
    }

    impl Sleeper {
        pub fn new(ear: Ear, events: RawFd) -> Self {
            Self { ear, events }
        }

        pub fn sleep(&mut self, limit: Duration) {
            // SAFETY: the worker's descriptor stays open as long as the worker, which outlives its sleeper's use.
            let events = unsafe { BorrowedFd::borrow_raw(self.events) };
            let mut waited = [PollFd::new(&events, PollFlags::IN), PollFd::new(&self.ear, PollFlags::IN)];
            let limit = Timespec { tv_sec: limit.as_secs() as _, tv_nsec: i64::from(limit.subsec_nanos()) as _ };
            // Interrupted or not: the caller looks at everything anyway.
            let _ = poll(&mut waited, Some(&limit));
            let mut rings = [0; 64];
            while matches!((&self.ear).read(&mut rings), Ok(64)) {}
        }
    }
}

// There is no UCX for other systems; what is here only lets the crate build.
#[cfg(not(unix))]
mod system {
    use std::time::Duration;

    pub type Ear = ();

    pub struct Bell;

    pub struct Sleeper;

    pub fn pair() -> std::io::Result<(Bell, Ear)> {
        Ok((Bell, ()))
    }

    impl Bell {
        pub fn ring(&self) {}
    }

    impl Sleeper {
        pub fn new((): Ear, _events: i32) -> Self {
            Self
        }

        pub fn sleep(&mut self, limit: Duration) {
            std::thread::sleep(limit.min(Duration::from_millis(1)));
        }
    }
}

pub use system::{Bell, Ear, Sleeper, pair};

/// Longest sleep while something is in flight: wakeups of UCX have been seen to stall, and deadlines are looked at after
/// each sleep.
pub const IN_FLIGHT: Duration = Duration::from_millis(5);
/// Longest sleep otherwise.
pub const IDLE: Duration = Duration::from_secs(1);
/// How long an engine that has just been busy looks around before it sleeps.
pub const SPIN: Duration = Duration::from_micros(20);
