//! Random faults of the network, of either node, of its disk, and of the client: one a case.

use crate::{alone, setup};
use async_trait::async_trait;
use oasis_core::config::Bytes;
use oasis_core::executor::Executor;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{LayerId, RequestId};
use oasis_core::memory::{
    BlockWrite, EntryKey, FetchedEntries, KvStore, Reservation, StoreError, StoreMetrics, StoreSpec, StoreUsage,
};
use oasis_core::testkit::faulty::{Faults, FaultyStore};
use oasis_core::testkit::{Random, for_all};
use oasis_nodes::{PrefillNode, TransferMode};
use oasis_tests::nodes::{Network, Said, Setup, assert_idle, eventually, run};
use oasis_tests::survivors::requests;
use oasis_tests::within;
use oasis_transport::stores::{Dram, Ssd, SsdIo};
use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Deadline of every operation, and the lease of [`Fault::Lease`].
const TIMEOUT: Duration = Duration::from_millis(150);
const LEASE: Duration = Duration::from_millis(60);

/// What goes wrong. A number of tokens is that of all requests together; a fault that never comes to be is one too.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The network is cut once so many bytes have passed to the decode node.
    CutAtByte(u64),
    CutAtToken(usize),
    /// Nothing passes any more; nobody is told.
    Silence(usize),
    /// The same before one step, for a time that is shorter than the deadline.
    Hiccup(usize),
    /// The prefill node is killed, and another started in its place.
    Death(usize),
    /// One in so many reads and writes of the prefill node's disk fails.
    PrefillDisk(usize),
    /// The same of the decode node's.
    DecodeDisk(usize),
    /// Each read of the prefill node's disk takes so many milliseconds.
    SlowDisk(u64),
    /// Bytes of the staged blocks are overwritten.
    Corruption(usize),
    /// The staging pool has room for one request.
    FullDisk,
    /// Nothing passes for longer than the lease, but shorter than the deadline.
    Lease(usize),
    /// One request is cancelled before a step.
    Cancel {
        which: usize,
        step: usize,
    },
    /// The decode node is killed after so many steps, and another started in its place.
    DecodeDeath(usize),
}

impl Fault {
    fn any(random: &mut Random, bytes: u64) -> Self {
        let tokens = random.below(40);
        match random.below(13) {
            0 => Self::CutAtByte(random.below(bytes as usize) as u64),
            1 => Self::CutAtToken(tokens),
            2 => Self::Silence(tokens),
            3 => Self::Hiccup(tokens),
            4 => Self::Death(tokens),
            5 => Self::PrefillDisk(random.within(2, 40)),
            6 => Self::DecodeDisk(random.within(2, 40)),
            7 => Self::SlowDisk(random.within(1, 12) as u64),
            8 => Self::Corruption(tokens),
            9 => Self::FullDisk,
            10 => Self::Lease(tokens),
            11 => Self::Cancel { which: random.below(3), step: random.below(60) },
            _ => Self::DecodeDeath(random.below(60)),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::CutAtByte(_) => "network cut, at a byte",
            Self::CutAtToken(_) => "network cut, at a token",
            Self::Silence(_) => "network silent",
            Self::Hiccup(_) => "network stands still for a moment",
            Self::Death(_) => "prefill node killed",
            Self::PrefillDisk(_) => "prefill node's disk fails",
            Self::DecodeDisk(_) => "decode node's disk fails",
            Self::SlowDisk(_) => "prefill node's disk is slow",
            Self::Corruption(_) => "staged blocks overwritten",
            Self::FullDisk => "staging pool full",
            Self::Lease(_) => "lease ends",
            Self::Cancel { .. } => "request cancelled",
            Self::DecodeDeath(_) => "decode node killed",
        }
    }
}

/// A store whose reads take their time.
struct Slow {
    inner: Arc<dyn KvStore>,
    ms: AtomicU64,
}

#[async_trait]
impl KvStore for Slow {
    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }

    fn metrics(&self) -> StoreMetrics {
        self.inner.metrics()
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        self.inner.reserve(request, geometry, blocks)
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        self.inner.put(request, layer, blocks).await
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        tokio::time::sleep(Duration::from_millis(self.ms.load(Ordering::SeqCst))).await;
        self.inner.fetch(keys).await
    }

    fn release(&self, request: RequestId) {
        self.inner.release(request);
    }
}

fn dram(capacity: u64) -> Arc<dyn KvStore> {
    Dram { capacity: Bytes(capacity) }.build().unwrap()
}

/// What the largest request takes of a staging pool.
fn staged_bytes(setup: &Setup) -> u64 {
    let geometry = setup.single().executor().info().geometry;
    requests().iter().map(|request| geometry.dense_bytes(request.prompt.len() + 2)).max().unwrap_or(0)
}

fn failing(seed: u64, one_in: usize) -> Arc<dyn KvStore> {
    let faults = |seed| Faults::seeded(seed, one_in, 80);
    Arc::new(FaultyStore { inner: dram(1 << 30), puts: faults(seed), fetches: faults(seed + 1) })
}

/// Overwrites bytes in the middle of every file of the store.
fn corrupt(directory: &Path, random: &mut Random) {
    for file in std::fs::read_dir(directory).unwrap().flatten() {
        // A file that has gone meanwhile cannot be damaged.
        let Ok(mut file) = std::fs::OpenOptions::new().write(true).open(file.path()) else { continue };
        let length = file.metadata().map_or(0, |data| data.len()).max(8) as usize;
        for _ in 0..16 {
            file.seek(SeekFrom::Start(random.below(length - 7) as u64)).unwrap();
            file.write_all(&[0xa5; 7]).unwrap();
        }
    }
}

/// How the requests of a case ended.
#[derive(Default)]
struct Tally {
    cases: usize,
    finished: usize,
    failed: usize,
    cancelled: usize,
}

/// Runs one case. Every request says what it says alone, or a prefix of it and a reason; nothing is held afterwards; a
/// later request is answered.
fn survive(setup: &Setup, expected: &[Said], fault: Fault, random: &mut Random, tally: &mut Tally) {
    let transfer = random.pick(&[TransferMode::Partial, TransferMode::Partial, TransferMode::Full]);
    let (delay, seed) = (Duration::from_millis(random.below(4) as u64), u64::from(random.any::<u32>()));
    let directory = tempfile::tempdir().unwrap();
    let mut setup = setup.clone();
    let slow = Arc::new(Slow { inner: dram(1 << 30), ms: AtomicU64::new(0) });
    let store: Arc<dyn KvStore> = match fault {
        Fault::PrefillDisk(one_in) => failing(seed, one_in),
        Fault::SlowDisk(ms) => {
            slow.ms.store(ms, Ordering::SeqCst);
            slow.clone()
        }
        Fault::Corruption(_) => {
            // Hardly any room in memory: blocks are on the disk when they are read.
            let (directory, write_buffer) = (directory.path().to_owned(), Bytes(16 << 10));
            let io = SsdIo::Plain;
            Ssd { directory, capacity: Bytes(64 << 20), write_buffer, queue_depth: 4, io, ..Ssd::default() }
                .build()
                .unwrap()
        }
        Fault::FullDisk => dram(staged_bytes(&setup)),
        _ => dram(1 << 30),
    };
    if matches!(fault, Fault::Lease(_)) {
        setup.lease = LEASE;
    }
    let mut inner = match fault {
        Fault::DecodeDisk(one_in) => failing(seed, one_in),
        _ => dram(1 << 30),
    };
    let mut prefill: Option<PrefillNode> = Some(setup.prefill_over(store.clone(), "127.0.0.1:0"));
    let address = prefill.as_ref().expect("just started").address();
    let network = Network::new(address);
    network.delay(delay);
    let mut decode = setup.decode_over(inner.clone(), network.address(), transfer);
    if let Fault::DecodeDeath(steps) = fault {
        for request in requests() {
            decode.submit(request).unwrap();
        }
        (0..steps).for_each(|_| drop(decode.step().unwrap()));
        drop(decode);
        tally.cancelled += 3;
        // Its memory is gone with it.
        inner = dram(1 << 30);
        decode = setup.decode_over(inner.clone(), network.address(), transfer);
    }
    let (start, mut is_done, mut is_cancelled) = (Instant::now(), false, false);
    let (_, ran) = run(&mut decode, &requests(), |engine, number, said| {
        let tokens = said.iter().map(|said| said.tokens.len()).sum::<usize>();
        let is_due = |at| tokens >= at && !is_done;
        match fault {
            Fault::CutAtByte(bytes) if number == 0 => network.cut_after(bytes),
            Fault::CutAtToken(at) if is_due(at) => network.cut(),
            Fault::Silence(at) => return network.stop(tokens >= at),
            Fault::Hiccup(at) if number == at => {
                network.stop(true);
                std::thread::sleep(TIMEOUT / 7);
                return network.stop(false);
            }
            Fault::Lease(at) if is_due(at) => {
                network.stop(true);
                std::thread::sleep(LEASE + LEASE / 2);
                network.stop(false);
            }
            Fault::Death(at) if is_due(at) => {
                drop(prefill.take());
                let held = store.usage();
                assert_eq!((held.used, held.reserved, held.requests), (0, 0, 0), "a node that is gone holds blocks");
                prefill = Some(setup.prefill_over(store.clone(), &address.to_string()));
            }
            Fault::Corruption(at) if is_due(at) => corrupt(directory.path(), random),
            Fault::Cancel { which, step } if number == step => {
                // The engine's requests have the numbers from 1.
                engine.cancel(RequestId(1 + which as u64));
                is_cancelled = true;
            }
            _ => return,
        }
        is_done = true;
    });
    assert!(start.elapsed() < 10 * TIMEOUT + Duration::from_secs(10), "late: {:?}", start.elapsed());
    for (said, expected) in ran.iter().zip(expected) {
        assert_eq!(said.tokens, expected.tokens[..said.tokens.len()], "a wrong token");
        match (&said.error, said.finished) {
            (None, true) => {
                assert_eq!(said, expected, "less than everything");
                tally.finished += 1;
            }
            (Some(_), false) => tally.failed += 1,
            (None, false) if is_cancelled => tally.cancelled += 1,
            _ => panic!("neither an answer nor a reason: {said:?}"),
        }
    }
    network.stop(false);
    network.delay(Duration::ZERO);
    network.cut_after(u64::MAX);
    slow.ms.store(0, Ordering::SeqCst);
    eventually(&format!("a later request is answered after {fault:?}"), || {
        let (_, again) = run(&mut decode, &requests()[..1], |_, _, _| ());
        // The disk fails on; on a busy machine an honest answer may miss a short deadline; and the session may be cut before
        // this end of it knows.
        let excused = ["injected fault", "no answer within", "lease of", "the peer closed the connection"];
        let is_excused = again[0].error.as_ref().is_some_and(|error| excused.iter().any(|e| error.contains(e)));
        assert!(is_excused || again[0] == expected[0], "a later request: {:?}", again[0]);
        !is_excused
    });
    assert_idle(prefill.as_ref().expect("there is always one"), decode.executor());
    drop((decode, prefill));
    for store in [store, inner] {
        let held = store.usage();
        assert_eq!((held.used, held.reserved, held.requests), (0, 0, 0), "something is left");
    }
}

#[test]
fn random_faults_give_no_wrong_token_and_leave_nothing() {
    // Each waits for deadlines: not as many as other random tests have.
    let cases = std::env::var("OASIS_NODE_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or(25);
    within(Duration::from_secs(100 + 3 * cases), move || {
        let mut setup = setup("draft-query", "fetch-all");
        let expected = alone(&setup, &requests());
        let bytes = {
            let prefill = setup.prefill();
            let network = Network::new(prefill.address());
            let mut decode = setup.decode(network.address(), TransferMode::Partial);
            assert_eq!(run(&mut decode, &requests(), |_, _, _| ()).1, expected);
            network.passed()
        };
        setup.timeout = TIMEOUT;
        let mut tallies = BTreeMap::<&str, Tally>::new();
        for_all(cases, |random| {
            let fault = Fault::any(random, bytes);
            let tally = tallies.entry(fault.name()).or_default();
            tally.cases += 1;
            survive(&setup, &expected, fault, random, tally);
        });
        println!("{:<34} {:>5} {:>9} {:>7} {:>10}", "fault", "cases", "finished", "failed", "cancelled");
        let mut all = Tally::default();
        let line = |name: &str, tally: &Tally| {
            let Tally { cases, finished, failed, cancelled } = tally;
            println!("{name:<34} {cases:>5} {finished:>9} {failed:>7} {cancelled:>10}");
        };
        for (name, tally) in &tallies {
            line(name, tally);
            all.cases += tally.cases;
            all.finished += tally.finished;
            all.failed += tally.failed;
            all.cancelled += tally.cancelled;
        }
        line("all", &all);
        println!("no wrong token, nothing held, nothing late");
        assert!(all.failed >= all.cases / 4 && all.finished >= all.cases / 2, "faults that do nothing, or everything");
    });
}
