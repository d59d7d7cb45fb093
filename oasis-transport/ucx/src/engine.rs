//! The handle of an engine, and what its users see.

use crate::descriptor::Descriptor;
use crate::error::{ReadError, Unavailable};
use crate::memory::{Buffer, Region, Word};
use crate::probe;
use crate::settings::{Access, Segment, Settings, Wire};
use crate::wait::{self, Bell};
use crate::worker::{self, Command, Operation};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// A peer whose pool can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    pub(crate) id: u64,
    /// Bytes of its pool.
    len: u64,
}

/// UCX with a thread that runs it. The thread sleeps while there is nothing to do, and ends with the last handle.
#[derive(Clone)]
pub struct Engine(Arc<Handle>);

struct Handle {
    commands: mpsc::Sender<Command>,
    bell: Bell,
    version: [u32; 3],
    thread: Option<JoinHandle<()>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // An engine that has ended needs no command.
        let _ = self.commands.send(Command::Stop);
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            // A panic of the engine is a bug of ours; it has been printed already.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("version", &self.version()).finish_non_exhaustive()
    }
}

impl Engine {
    /// Opens UCX and starts a thread for it.
    ///
    /// # Errors
    /// When there is no UCX, no RDMA adapter for [`Wire::Rdma`], or UCX does not start.
    pub fn start(settings: &Settings) -> Result<Self, Unavailable> {
        if settings.wire == Wire::Rdma && std::env::var_os("UCX_TLS").is_none() {
            probe::require_adapter(settings.device.as_deref())?;
        }
        let (ucp, version) = settings.search.open()?;
        let machine = |error: std::io::Error| Unavailable {
            what: "UCX".to_owned(),
            expected: "a thread and a pair of sockets".to_owned(),
            found: error.to_string(),
            hint: "see the limits of the process (ulimit -a)".to_owned(),
        };
        let (bell, ear) = wait::pair().map_err(machine)?;
        let (commands, queue) = mpsc::channel();
        let (started, answer) = mpsc::channel();
        let settings = settings.clone();
        let run = move || worker::run(ucp, version, &settings, ear, &queue, &started);
        let thread = std::thread::Builder::new().name("oasis-ucx".to_owned()).spawn(run).map_err(machine)?;
        // The thread has ended, without an answer or with a refusal, when there is no engine.
        let started = answer.recv().unwrap_or_else(|_| Err(stopped()));
        let handle = Handle { commands, bell, version, thread: Some(thread) };
        started.map(|()| Self(Arc::new(handle)))
    }

    /// Release of UCX, such as `1.13.1`.
    pub fn version(&self) -> String {
        let [major, minor, release] = self.0.version;
        format!("{major}.{minor}.{release}")
    }

    fn send(&self, command: Command) {
        // Whoever waits for an answer of an engine that has ended gets none, and says so.
        let _ = self.0.commands.send(command);
        self.0.bell.ring();
    }

    /// Takes `len` bytes of memory and registers them, for as long as the engine runs.
    ///
    /// # Errors
    /// When the machine has no such memory, or does not let it be pinned.
    pub fn pool(&self, len: usize, access: Access) -> Result<Pool, Unavailable> {
        let region = Region::new(len).ok_or_else(|| Unavailable {
            what: "UCX".to_owned(),
            expected: format!("{len} bytes of memory"),
            found: "fewer".to_owned(),
            hint: "a smaller store.capacity".to_owned(),
        })?;
        let (reply, answer) = mpsc::channel();
        self.send(Command::Register { region: region.clone(), access, reply });
        let descriptor = answer.recv().unwrap_or_else(|_| Err(stopped()))?;
        Ok(Pool { region, descriptor: Arc::new(descriptor) })
    }

    /// Connects to the owner of a pool. UCX builds the connection with the first read.
    ///
    /// # Errors
    /// [`ReadError::Versions`] before UCX sees anything of the descriptor, or [`ReadError::Lost`].
    pub async fn connect(&self, descriptor: Descriptor) -> Result<Peer, ReadError> {
        let release = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        let [major, minor, _] = self.0.version;
        if descriptor.version != (major, minor) {
            let (ours, theirs) = (release((major, minor)), release(descriptor.version));
            return Err(ReadError::Versions { ours, theirs });
        }
        let len = descriptor.len;
        let (reply, answer) = oneshot::channel();
        self.send(Command::Connect { descriptor, reply });
        let id = answer.await.map_err(|_| ReadError::Stopped)??;
        Ok(Peer { id, len })
    }

    /// Reads pieces of a peer's pool into `buffer`, all in one batch, and gives the buffer back.
    ///
    /// The engine holds the buffer until nothing of the read can be written any more, whether this future is awaited,
    /// dropped, or has failed: an operation that is not complete in time, or fails, closes the connection by force, and
    /// the buffer goes back to its pool when UCX has said that it is closed.
    ///
    /// # Errors
    /// [`ReadError`]. But for [`ReadError::OutOfBounds`] and [`ReadError::ForeignBuffer`] the peer is of no use any more:
    /// each further read answers with the reason, until [`close`](Self::close) forgets it.
    pub async fn read(
        &self,
        peer: Peer,
        mut segments: Vec<Segment>,
        buffer: Buffer,
        limit: Duration,
    ) -> Result<Buffer, ReadError> {
        segments.retain(|segment| segment.len > 0);
        for &Segment { local, remote, len } in &segments {
            check("the peer's pool", peer.len, remote, len)?;
            check("the buffer", buffer.len() as u64, local as u64, len)?;
        }
        let (reply, answer) = oneshot::channel();
        self.send(Command::Read(Operation::new(peer.id, segments, buffer, Instant::now(), limit, reply)));
        answer.await.map_err(|_| ReadError::Stopped)?
    }

    /// Closes the connection by force and forgets the peer; reads in flight fail. The returned future waits until it is
    /// closed.
    pub fn close(&self, peer: Peer) -> impl Future<Output = ()> + use<> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Close { peer: peer.id, reply });
        async move {
            // An engine that has ended has closed everything.
            let _ = answer.await;
        }
    }
}

fn check(what: &'static str, limit: u64, offset: u64, len: usize) -> Result<(), ReadError> {
    let len = len as u64;
    match offset.checked_add(len).is_some_and(|end| end <= limit) {
        true => Ok(()),
        false => Err(ReadError::OutOfBounds { what, limit, offset, len }),
    }
}

fn stopped() -> Unavailable {
    Unavailable {
        what: "UCX".to_owned(),
        expected: "a running engine".to_owned(),
        found: "one that has stopped".to_owned(),
        hint: "its log says why".to_owned(),
    }
}

/// Registered memory that is lent out in buffers. Buffers may outlive the pool and the engine.
pub struct Pool {
    region: Arc<Region>,
    descriptor: Arc<Descriptor>,
}

impl Pool {
    /// What readers need, of a pool that is [`Access::Lent`].
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// A buffer of `len` bytes; `None` when there is no room for it.
    pub fn take(&self, len: usize) -> Option<Buffer> {
        self.region.take(len)
    }

    /// A buffer of `len` bytes as soon as there is room, in turn; `None` when there never is.
    pub async fn take_when_free(&self, len: usize) -> Option<Buffer> {
        self.region.take_when_free(len).await
    }

    /// A number that peers can read; `None` when there is no room for it.
    pub fn word(&self, value: u64) -> Option<Word> {
        Some(Word::new(self.region.take(size_of::<u64>())?, value))
    }

    /// Where bytes of the pool lie, from its first; `None` for other memory.
    pub fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let offset = (bytes.as_ptr() as usize).checked_sub(self.region.base() as usize)?;
        (offset.checked_add(bytes.len())? <= self.region.len()).then_some(offset as u64)
    }

    /// Bytes of the whole.
    pub fn capacity(&self) -> usize {
        self.region.len()
    }

    /// Bytes that are lent out, each buffer rounded up to 64.
    pub fn used(&self) -> usize {
        self.region.used()
    }
}
