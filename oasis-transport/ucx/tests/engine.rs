//! Two processes: one owns memory, the other reads it, over UCX's TCP transport on loopback.
#![cfg(unix)]

use oasis_ucx::{Access, Buffer, Descriptor, Engine, Peer, Pool, ReadError, Search, Segment, Settings, Wire};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Bytes of one block, of the owner's pool, and of a landing pool.
const BLOCK: usize = 8192;
const POOL: usize = 64 << 20;
const LANDING: usize = 16 << 20;
const LIMIT: Duration = Duration::from_secs(20);

fn settings() -> Settings {
    Settings { search: Search::default(), wire: Wire::Tcp, device: None }
}

/// Says aloud that a test does not run for want of UCX; a variable makes that a failure.
fn has_ucx() -> bool {
    match Search::default().version() {
        Ok(_) => true,
        Err(error) => {
            assert!(std::env::var_os("OASIS_REQUIRE_UCX").is_none(), "{error}");
            eprintln!("SKIPPED, UCX is missing: {error}");
            false
        }
    }
}

/// What the owner's memory holds at word `index`: no two words are alike.
fn word(index: u64) -> u64 {
    let z = (index ^ (index >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(7);
    (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

fn holds_block(bytes: &[u8], remote: u64) -> bool {
    let words = bytes.chunks_exact(8).enumerate();
    words.into_iter().all(|(i, bytes)| bytes == word(remote / 8 + i as u64).to_le_bytes())
}

#[test]
#[ignore = "the process whose memory the other tests read; they start it"]
fn owner() {
    let engine = Engine::start(&settings()).unwrap();
    let pool = engine.pool(POOL, Access::Lent).unwrap();
    let mut memory = pool.take(POOL - BLOCK).unwrap();
    for (index, bytes) in memory.bytes_mut().chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word(index as u64).to_le_bytes());
    }
    let epoch = pool.word(1).unwrap();
    let hex: String = pool.descriptor().encode().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\nlent {} {hex}", epoch.offset());
    for line in std::io::stdin().lines() {
        epoch.set(line.unwrap().parse().unwrap());
        println!("done");
    }
}

struct Owner {
    process: Child,
    answers: BufReader<std::process::ChildStdout>,
    epoch: u64,
    descriptor: Descriptor,
}

impl Owner {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "owner", "--nocapture"]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut answers = BufReader::new(process.stdout.take().unwrap());
        loop {
            let mut line = String::new();
            assert!(answers.read_line(&mut line).unwrap() > 0, "the owner has ended");
            let Some(rest) = line.trim().strip_prefix("lent ") else { continue };
            let (epoch, hex) = rest.split_once(' ').unwrap();
            let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
            let (epoch, descriptor) = (epoch.parse().unwrap(), Descriptor::decode(&bytes).unwrap());
            return Self { process, answers, epoch, descriptor };
        }
    }

    fn set_epoch(&mut self, value: u64) {
        let mut stdin = self.process.stdin.as_ref().unwrap();
        writeln!(stdin, "{value}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert_eq!(line, "done\n");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Reader {
    engine: Engine,
    landing: Pool,
}

impl Reader {
    fn start() -> Self {
        let engine = Engine::start(&settings()).unwrap();
        let landing = engine.pool(LANDING, Access::Landing).unwrap();
        Self { engine, landing }
    }

    async fn connect(&self, owner: &Owner) -> Peer {
        self.engine.connect(owner.descriptor.clone()).await.unwrap()
    }

    async fn read(&self, peer: Peer, segments: Vec<Segment>, limit: Duration) -> Result<Buffer, ReadError> {
        let len = segments.iter().map(|segment| segment.local + segment.len).max().unwrap_or(0);
        let buffer = self.landing.take_when_free(len).await.unwrap();
        self.engine.read(peer, segments, buffer, limit).await
    }

    /// Reads scattered blocks until something fails.
    async fn read_until_it_fails(&self, peer: Peer, limit: Duration) -> (usize, ReadError) {
        for count in 0.. {
            match self.read(peer, scattered(1024, count), limit).await {
                Ok(buffer) => assert_eq!(buffer.len(), 1024 * BLOCK),
                Err(error) => return (count, error),
            }
        }
        unreachable!("reads go on for ever")
    }
}

/// `count` different blocks of the owner's memory in no order, the first `salt` left out.
fn scattered(count: usize, salt: usize) -> Vec<Segment> {
    let blocks = POOL / BLOCK - 1;
    // 997 and the number of blocks have no common factor.
    let remote = |i: usize| ((i + salt) * 997 % blocks * BLOCK) as u64;
    (0..count).map(|i| Segment { local: i * BLOCK, remote: remote(i), len: BLOCK }).collect()
}

fn run(test: impl Future<Output = ()>) {
    if has_ucx() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(3 * LIMIT, test).await.expect("a test within its time") });
    }
}

#[test]
fn scattered_blocks_arrive_where_they_belong() {
    run(async {
        let mut owner = Owner::start();
        let reader = Reader::start();
        let peer = reader.connect(&owner).await;
        for count in [1, 2, 129, 2000] {
            let segments = scattered(count, count);
            let buffer = reader.read(peer, segments.clone(), LIMIT).await.unwrap();
            for Segment { local, remote, len } in segments {
                assert!(holds_block(&buffer.bytes()[local..local + len], remote), "{count} blocks, at {remote}");
            }
        }
        // One piece of every length around what UCX treats differently.
        for len in [8, 72, 4096, 65_528, 1 << 20, 16 << 20] {
            let buffer = reader.read(peer, vec![Segment { local: 0, remote: 640, len }], LIMIT).await.unwrap();
            assert!(holds_block(buffer.bytes(), 640), "{len} bytes");
        }
        for value in [1, 5, u64::MAX] {
            owner.set_epoch(value);
            let segment = Segment { local: 0, remote: owner.epoch, len: 8 };
            let buffer = reader.read(peer, vec![segment], LIMIT).await.unwrap();
            assert_eq!(buffer.bytes(), value.to_le_bytes());
        }
        assert_eq!(reader.landing.used(), 0);
        let nothing = reader.read(peer, Vec::new(), LIMIT).await.unwrap();
        assert!(nothing.is_empty());
        reader.engine.close(peer).await;
        assert_eq!(reader.read(peer, scattered(1, 0), LIMIT).await.err(), Some(ReadError::Closed));
    });
}

#[test]
fn what_does_not_fit_is_refused_and_the_connection_goes_on() {
    run(async {
        let owner = Owner::start();
        let reader = Reader::start();
        let peer = reader.connect(&owner).await;
        let (pool, len) = (POOL as u64, BLOCK);
        for (local, remote) in [(0, pool), (0, pool - 1), (0, u64::MAX), (1, 0), (usize::MAX, 0)] {
            let buffer = reader.landing.take(BLOCK).unwrap();
            let refused = reader.engine.read(peer, vec![Segment { local, remote, len }], buffer, LIMIT).await;
            let refused = refused.err().map(|error| matches!(error, ReadError::OutOfBounds { .. }));
            assert_eq!(refused, Some(true), "{local} {remote}");
        }
        let other = Reader::start();
        let foreign = other.landing.take(BLOCK).unwrap();
        let refused = reader.engine.read(peer, scattered(1, 0), foreign, LIMIT).await.err();
        assert_eq!(refused, Some(ReadError::ForeignBuffer));

        let mut theirs = owner.descriptor.clone();
        theirs.version.1 += 1;
        let refused = reader.engine.connect(theirs).await.unwrap_err().to_string();
        assert!(refused.contains("UCX: expected release 1.") && refused.contains("install the same"), "{refused}");
        let buffer = reader.read(peer, scattered(1, 3), LIMIT).await.unwrap();
        assert!(holds_block(buffer.bytes(), 3 * 997 * BLOCK as u64));
    });
}

#[test]
fn a_killed_owner_ends_its_reads_and_no_others() {
    run(async {
        let (owner, other) = (Owner::start(), Owner::start());
        let reader = Reader::start();
        let (peer, neighbour) = (reader.connect(&owner).await, reader.connect(&other).await);
        let kill = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            owner.signal(Signal::KILL);
            Instant::now()
        };
        let aside = async {
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(1) {
                reader.read(neighbour, scattered(64, 1), LIMIT).await.unwrap();
            }
        };
        let (killed, (count, error), ()) = tokio::join!(kill, reader.read_until_it_fails(peer, LIMIT), aside);
        assert!(count > 0 && matches!(error, ReadError::Lost(_)), "{count} reads, then {error}");
        assert!(killed.elapsed() < LIMIT / 2, "{:?}", killed.elapsed());
        // The reason stays.
        assert_eq!(reader.read(peer, scattered(1, 0), LIMIT).await.err(), Some(error));
        reader.read(neighbour, scattered(64, 1), LIMIT).await.unwrap();
        let third = Owner::start();
        let again = reader.connect(&third).await;
        reader.read(again, scattered(64, 1), LIMIT).await.unwrap();
        // Everything comes back.
        assert!(reader.landing.take_when_free(LANDING).await.is_some());
    });
}

#[test]
fn nothing_arrives_after_a_deadline() {
    run(async {
        let owner = Owner::start();
        let reader = Reader::start();
        let peer = reader.connect(&owner).await;
        reader.read(peer, scattered(2000, 0), LIMIT).await.unwrap();
        owner.signal(Signal::STOP);
        let (start, limit) = (Instant::now(), Duration::from_secs(1));
        let error = reader.read(peer, scattered(2000, 0), limit).await.err();
        assert_eq!(error, Some(ReadError::TimedOut(limit)));
        assert!(start.elapsed() < limit * 2, "{:?}", start.elapsed());
        let mut buffer = reader.landing.take_when_free(LANDING).await.unwrap();
        buffer.bytes_mut().fill(0xaa);
        owner.signal(Signal::CONT);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(buffer.bytes().iter().all(|&byte| byte == 0xaa), "a late write");
        drop(buffer);
        reader.engine.close(peer).await;
        let again = reader.connect(&owner).await;
        let late = reader.read(again, scattered(2000, 0), LIMIT).await.unwrap();
        assert!(holds_block(&late.bytes()[..BLOCK], 0));
    });
}

#[test]
fn a_read_that_nobody_awaits_keeps_its_buffer_until_it_has_ended() {
    run(async {
        let owner = Owner::start();
        let reader = Reader::start();
        let peer = reader.connect(&owner).await;
        reader.read(peer, scattered(1, 0), LIMIT).await.unwrap();
        owner.signal(Signal::STOP);
        let limit = Duration::from_millis(700);
        let waits = reader.read(peer, scattered(2000, 0), limit);
        tokio::time::timeout(Duration::from_millis(100), waits).await.expect_err("the owner stands still");
        assert!(reader.landing.used() >= 2000 * BLOCK, "the buffer is still written to");
        let start = Instant::now();
        assert!(reader.landing.take_when_free(LANDING).await.is_some());
        assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
        // So is one whose engine ends.
        let peer = reader.connect(&owner).await;
        let waits = reader.read(peer, scattered(2000, 0), LIMIT);
        tokio::time::timeout(Duration::from_millis(100), waits).await.expect_err("the owner stands still");
        let Reader { engine, landing } = reader;
        drop(engine);
        assert_eq!(landing.used(), 0);
    });
}

#[test]
fn an_owner_serves_only_as_long_as_it_lives() {
    run(async {
        let mut owner = Owner::start();
        let reader = Reader::start();
        let peer = reader.connect(&owner).await;
        reader.read(peer, scattered(8, 0), LIMIT).await.unwrap();
        // It ends by itself: endpoints of readers are still open.
        drop(owner.process.stdin.take());
        let status = owner.process.wait().unwrap();
        let mut rest = String::new();
        owner.answers.read_to_string(&mut rest).unwrap();
        assert!(status.success(), "{status}: {rest}");
        let error = reader.read(peer, scattered(8, 0), LIMIT).await.err();
        assert!(matches!(error, Some(ReadError::Lost(_))), "{error:?}");
    });
}
