//! The prefill node: reads prompts, runs the first decode step, lends the blocks.

mod session;
mod worker;

use crate::io::{IoThread, accept_each, listen};
use oasis_core::geometry::KvGeometry;
use oasis_core::hand_over::HandsOver;
use oasis_core::ids::RequestId;
use oasis_core::memory::{KvStore, StoreUsage};
use oasis_transport::remote::{Service, StagingPool, Terms, accept};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use worker::{Job, Worker};

/// Sessions that may be open at once; further clients wait.
const MAX_SESSIONS: usize = 64;

/// Settings of a prefill node.
#[derive(Debug, Clone)]
pub struct PrefillOptions {
    /// `host:port`; port 0 takes a free one.
    pub listen: String,
    /// Secret, facts and the deadline of every operation.
    pub terms: Terms,
    /// How long blocks are kept without a sign of life from the decode node.
    pub lease: Duration,
    /// How long a prompt waits for room in the staging pool before it is refused.
    pub wait: Duration,
    /// Registered memory in which the blocks of the node's store lie, where decode nodes may read them from it.
    pub staging: Option<Arc<StagingPool>>,
}

/// What a prefill node holds now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefillStatus {
    /// Open sessions.
    pub sessions: usize,
    /// Prompts that are being read or wait for it.
    pub jobs: usize,
    /// Requests whose blocks are kept.
    pub granted: usize,
    /// Blocks of a layer sent since the start.
    pub blocks_sent: u64,
    /// The staging pool.
    pub store: StoreUsage,
    /// Bytes in use of registered memory, where blocks lie in it.
    pub registered: usize,
}

/// A prefill node that serves until it is dropped.
pub struct PrefillNode {
    address: SocketAddr,
    shared: Arc<Shared>,
    // Sessions end before the worker, whose queue they fill.
    _io: IoThread,
    _worker: WorkerThread,
}

/// Waits for the worker when the node is dropped.
struct WorkerThread(Option<JoinHandle<()>>);

/// What sessions and the worker share.
struct Shared {
    options: PrefillOptions,
    geometry: KvGeometry,
    store: Arc<dyn KvStore>,
    counts: Arc<Counts>,
    next_request: AtomicU64,
}

#[derive(Default)]
struct Counts {
    sessions: AtomicUsize,
    jobs: AtomicUsize,
    granted: AtomicUsize,
    blocks_sent: AtomicU64,
}

/// Counts one thing as long as it lives.
struct Counted(Arc<Counts>, fn(&Counts) -> &AtomicUsize);

impl Counted {
    fn new(counts: &Arc<Counts>, which: fn(&Counts) -> &AtomicUsize) -> Self {
        which(counts).fetch_add(1, Ordering::SeqCst);
        Self(counts.clone(), which)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.1)(&self.0).fetch_sub(1, Ordering::SeqCst);
    }
}

/// A request's blocks in the store, released with the last handle wherever that is.
struct Staged {
    request: RequestId,
    store: Arc<dyn KvStore>,
    _counted: Counted,
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.store.release(self.request);
    }
}

impl PrefillNode {
    /// Serves prompts with `executor`, whose blocks lie in `store`.
    ///
    /// # Errors
    /// When the address cannot be listened on, needs a secret, or the executor is dense.
    pub fn start(
        executor: impl HandsOver + 'static,
        store: Arc<dyn KvStore>,
        options: PrefillOptions,
    ) -> anyhow::Result<Self> {
        anyhow::ensure!(
            executor.info().budget_blocks.is_some(),
            "nodes: expected sparse decoding, found kv.budget_blocks = \"all\"\n  hint: set a number of blocks"
        );
        let listener = listen(&options.listen, &options.terms)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            geometry: executor.info().geometry,
            store,
            counts: Arc::default(),
            next_request: AtomicU64::new(1),
            options,
        });
        let (jobs, queue) = mpsc::channel::<Job>();
        let worker = {
            let shared = shared.clone();
            let worker = Worker::new(executor, shared);
            std::thread::Builder::new().name("oasis-prefill".to_owned()).spawn(move || worker.run(&queue))?
        };
        let io = IoThread::start("oasis-prefill-io")?;
        io.handle().spawn(serve(shared.clone(), listener, jobs));
        Ok(Self { address, shared, _io: io, _worker: WorkerThread(Some(worker)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it holds now.
    pub fn status(&self) -> PrefillStatus {
        let Counts { sessions, jobs, granted, blocks_sent } = &*self.shared.counts;
        PrefillStatus {
            sessions: sessions.load(Ordering::SeqCst),
            jobs: jobs.load(Ordering::SeqCst),
            granted: granted.load(Ordering::SeqCst),
            blocks_sent: blocks_sent.load(Ordering::SeqCst),
            store: self.shared.store.usage(),
            registered: self.shared.options.staging.as_ref().map_or(0, |staging| staging.used()),
        }
    }
}

impl Drop for WorkerThread {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(shared: Arc<Shared>, listener: std::net::TcpListener, jobs: mpsc::Sender<Job>) {
    accept_each(listener, MAX_SESSIONS, |stream, peer| {
        let (shared, jobs) = (shared.clone(), jobs.clone());
        async move {
            match accept(stream, Service::Prefill, &shared.options.terms).await {
                Ok(session) => session::run(shared, session, jobs, peer).await,
                Err(error) => tracing::warn!("{peer}: no session was opened: {error}"),
            }
        }
    })
    .await;
}
