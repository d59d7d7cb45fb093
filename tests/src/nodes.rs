//! Pairs of nodes on loopback, and a network between them that misbehaves.

use crate::models::parts;
use oasis_core::engine::{Engine, Event, GenerateRequest};
use oasis_core::executor::Executor;
use oasis_core::geometry::LAYOUT_VERSION;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::memory::{KvStore, StoreSpec};
use oasis_core::pipeline::Tracer;
use oasis_models::cpu::{CpuExecutor, CpuModel, CpuOptions, Residency, SparseParts};
use oasis_nodes::{DecodeExecutor, DecodeOptions, PrefillNode, PrefillOptions, TransferMode, node_facts};
use oasis_transport::remote::{PeerOptions, Secret, StagingPool, Terms, Tls};
use oasis_transport::stores::Dram;
use oasis_ucx::{Search, Settings, Wire};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What both nodes run.
#[derive(Clone)]
pub struct Setup {
    /// Model.
    pub model: Arc<CpuModel>,
    /// Sizes.
    pub options: CpuOptions,
    /// K.
    pub budget_blocks: usize,
    /// `key=value` settings of the policies.
    pub settings: Vec<String>,
    /// Deadline of every operation.
    pub timeout: Duration,
    /// Most time from the submission of a prompt to its first token.
    pub prefill_timeout: Duration,
    /// How long the prefill node keeps blocks without a sign of life.
    pub lease: Duration,
    /// Bytes of the staging pool.
    pub staging: u64,
    /// Shared secret.
    pub secret: String,
    /// Blocks are read from the prefill node's memory, by UCX over TCP.
    pub ucx: bool,
    /// Encryption.
    pub tls: Tls,
}

/// Whether there is UCX; said aloud, where it is missing.
///
/// # Panics
/// When it is missing and `OASIS_REQUIRE_UCX` is set, as where it has been installed.
pub fn has_ucx() -> bool {
    match Search::default().version() {
        Ok(_) => true,
        Err(error) => {
            assert!(std::env::var_os("OASIS_REQUIRE_UCX").is_none(), "{error}");
            eprintln!("SKIPPED, UCX is missing: {error}");
            false
        }
    }
}

impl Setup {
    /// Defaults for `model`.
    pub fn new(model: Arc<CpuModel>, options: CpuOptions, budget_blocks: usize, settings: &[&str]) -> Self {
        Self {
            model,
            options,
            budget_blocks,
            settings: settings.iter().map(|s| (*s).to_owned()).collect(),
            timeout: Duration::from_secs(20),
            prefill_timeout: Duration::from_secs(120),
            lease: Duration::from_secs(20),
            staging: 1 << 30,
            secret: String::new(),
            ucx: false,
            tls: Tls::default(),
        }
    }

    fn ucx(&self) -> Option<oasis_ucx::Engine> {
        let settings = Settings { search: Search::default(), wire: Wire::Tcp, device: None };
        self.ucx.then(|| oasis_ucx::Engine::start(&settings).unwrap())
    }

    fn parts(&self) -> SparseParts {
        let settings: Vec<&str> = self.settings.iter().map(String::as_str).collect();
        parts(&self.model, self.budget_blocks, self.options.block_tokens, &settings)
    }

    /// An executor over `store`.
    ///
    /// # Panics
    /// When the parts do not fit together.
    pub fn executor(&self, store: Arc<dyn KvStore>) -> CpuExecutor {
        let residency = Residency::Sparse(SparseParts { store, ..self.parts() });
        CpuExecutor::new(self.model.clone(), residency, self.options, Tracer::default()).unwrap()
    }

    /// What both nodes agree on.
    pub fn terms(&self) -> Terms {
        let executor = self.executor(self.parts().store);
        let policies: Vec<_> = self.settings.iter().map(|s| (s.clone(), String::new())).collect();
        Terms {
            secret: Secret::new(self.secret.as_str()),
            tls: self.tls.clone(),
            facts: node_facts(
                self.model.fingerprint(),
                &executor.info().geometry,
                LAYOUT_VERSION,
                self.budget_blocks,
                &policies,
            ),
            timeout: self.timeout,
        }
    }

    /// One node that does everything.
    pub fn single(&self) -> Engine<CpuExecutor> {
        Engine::new(self.executor(self.parts().store), 8)
    }

    /// A prefill node on a free port.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn prefill(&self) -> PrefillNode {
        let staging = self.ucx().map(|engine| StagingPool::start(engine, self.staging).unwrap());
        let store = match &staging {
            None => Dram { capacity: oasis_core::config::Bytes(self.staging) }.build().unwrap(),
            Some(staging) => staging.store(),
        };
        self.prefill_staging(store, staging, "127.0.0.1:0")
    }

    /// A prefill node at `listen` that stages in `store`.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn prefill_over(&self, store: Arc<dyn KvStore>, listen: &str) -> PrefillNode {
        self.prefill_staging(store, None, listen)
    }

    fn prefill_staging(&self, store: Arc<dyn KvStore>, staging: Option<Arc<StagingPool>>, listen: &str) -> PrefillNode {
        let options = PrefillOptions {
            listen: listen.to_owned(),
            terms: self.terms(),
            lease: self.lease,
            wait: Duration::from_secs(20),
            staging,
        };
        PrefillNode::start(self.executor(store.clone()), store, options).unwrap()
    }

    /// An engine whose prompts are read at `peer`.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn decode(&self, peer: SocketAddr, transfer: TransferMode) -> Engine<DecodeExecutor<CpuExecutor>> {
        self.decode_over(self.parts().store, peer, transfer)
    }

    /// The same, whose blocks lie in `inner`.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn decode_over(
        &self,
        inner: Arc<dyn KvStore>,
        peer: SocketAddr,
        transfer: TransferMode,
    ) -> Engine<DecodeExecutor<CpuExecutor>> {
        let options = DecodeOptions {
            peer: PeerOptions { address: peer.to_string(), terms: self.terms(), layers: self.model.spec().layers },
            ucx: self.ucx(),
            transfer,
            prefill_timeout: self.prefill_timeout,
        };
        Engine::new(DecodeExecutor::start(options, inner, |store| Ok(self.executor(store))).unwrap(), 8)
    }
}

/// What became of a request, without its logits: those of a step that another node ran are there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Said {
    /// Generated tokens.
    pub tokens: Vec<TokenId>,
    /// It got all its tokens.
    pub finished: bool,
    /// Why it failed.
    pub error: Option<String>,
}

/// Runs requests together; `before` is called before each step with its number.
///
/// # Panics
/// When a request is not taken, or the engine does not come to rest in two minutes.
pub fn run<E: Executor>(
    engine: &mut Engine<E>,
    requests: &[GenerateRequest],
    mut before: impl FnMut(&mut Engine<E>, usize, &[Said]),
) -> (Vec<RequestId>, Vec<Said>) {
    let ids: Vec<RequestId> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut said = vec![Said::default(); ids.len()];
    let start = Instant::now();
    for number in 0.. {
        before(engine, number, &said);
        if engine.is_idle() {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "the engine does not come to rest");
        for event in engine.step().expect("the CPU is not lost") {
            let of = |request| ids.iter().position(|id| *id == request).expect("a request of ours");
            match event {
                Event::Prefill { .. } => {}
                Event::Token { request, token } => said[of(request)].tokens.push(token),
                Event::Finished { request, .. } => said[of(request)].finished = true,
                Event::Refused { request, reason: error } | Event::Failed { request, error } => {
                    said[of(request)].error = Some(error);
                }
            }
        }
    }
    (ids, said)
}

/// Waits until `holds`, at most 20 seconds.
///
/// # Panics
/// When it does not come to hold.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Checks that neither node holds anything.
///
/// # Panics
/// When one does.
pub fn assert_idle(prefill: &PrefillNode, decode: &DecodeExecutor<CpuExecutor>) {
    crate::drive::assert_nothing_held(decode.inner());
    eventually("the prefill node holds nothing", || {
        let status = prefill.status();
        let store = status.store;
        let kept = (store.used, store.reserved, store.requests, status.registered);
        (status.jobs, status.granted, kept) == (0, 0, (0, 0, 0, 0))
    });
}

/// A network between two nodes: delays what passes, stops it, or cuts it.
pub struct Network {
    address: SocketAddr,
    state: Arc<NetworkState>,
}

struct NetworkState {
    target: SocketAddr,
    delay_ms: AtomicU64,
    /// Most bytes a second towards the client; 0 is any number.
    rate: AtomicU64,
    stopped: AtomicBool,
    /// Bytes that may still pass towards the client before everything is cut.
    fuse: AtomicU64,
    passed: AtomicU64,
    streams: Mutex<Vec<TcpStream>>,
}

impl Network {
    /// A network that leads to `target`.
    ///
    /// # Panics
    /// When there is no port.
    pub fn new(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(NetworkState {
            target,
            delay_ms: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            fuse: AtomicU64::new(u64::MAX),
            passed: AtomicU64::new(0),
            streams: Mutex::default(),
        });
        let shared = state.clone();
        // Ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(shared.target) else { continue };
                shared.streams.lock().unwrap().extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                let pairs = [(&client, &server, false), (&server, &client, true)];
                for (from, to, is_answer) in pairs {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let shared = shared.clone();
                    std::thread::spawn(move || shared.pass(from, to, is_answer));
                }
            }
        });
        Self { address, state }
    }

    /// Where it begins.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Delays every piece by so much.
    pub fn delay(&self, delay: Duration) {
        self.state.delay_ms.store(delay.as_millis() as u64, Ordering::SeqCst);
    }

    /// No more than so many bytes a second pass towards the client, on each connection.
    pub fn limit(&self, rate: u64) {
        self.state.rate.store(rate, Ordering::SeqCst);
    }

    /// Nothing passes any more, and nobody is told.
    pub fn stop(&self, stopped: bool) {
        self.state.stopped.store(stopped, Ordering::SeqCst);
    }

    /// Cuts everything once so many more bytes have passed towards the client.
    pub fn cut_after(&self, bytes: u64) {
        self.state.fuse.store(bytes, Ordering::SeqCst);
    }

    /// Bytes that have passed towards the client.
    pub fn passed(&self) -> u64 {
        self.state.passed.load(Ordering::SeqCst)
    }

    /// Cuts all connections; new ones are possible.
    pub fn cut(&self) {
        self.state.cut();
    }
}

impl NetworkState {
    fn cut(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream, is_answer: bool) {
        let mut buffer = vec![0; 16 << 10];
        // When the last piece is through a link of that rate.
        let mut free = Instant::now();
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            std::thread::sleep(Duration::from_millis(self.delay_ms.load(Ordering::SeqCst)));
            while self.stopped.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let rate = self.rate.load(Ordering::SeqCst);
            if is_answer && rate > 0 {
                free = free.max(Instant::now()) + Duration::from_secs_f64(count as f64 / rate as f64);
                std::thread::sleep(free.saturating_duration_since(Instant::now()));
            }
            if is_answer {
                self.passed.fetch_add(count as u64, Ordering::SeqCst);
                let left = self.fuse.load(Ordering::SeqCst);
                if (count as u64) > left {
                    let _ = to.write_all(&buffer[..left as usize]);
                    // Good for later connections.
                    self.fuse.store(u64::MAX, Ordering::SeqCst);
                    self.cut();
                    return;
                }
                if left != u64::MAX {
                    self.fuse.fetch_sub(count as u64, Ordering::SeqCst);
                }
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    }
}
