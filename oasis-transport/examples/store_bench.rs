//! Random reads of 8 KiB entries through the `ssd` store, beside what the disk gives without it.
//!
//! ```sh
//! cargo run --release -p oasis-transport --example store_bench -- FOLDER [GIB]
//! ```
//!
//! Writes GIB (2) gibibytes of KV to a store in FOLDER, reopens and adopts them, and reads random entries: straight
//! from an io_uring with `O_DIRECT`, by `fio` where it is installed, and through the store, in turn, five rounds of
//! each. The last line of each depth compares medians. Leave the machine idle meanwhile.

use anyhow::{Context, ensure};
use oasis_core::config::Bytes;
use oasis_core::geometry::{KvDtype, KvGeometry};
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId};
use oasis_core::memory::{BlockWrite, EntryKey, KvStore, Reservation};
use oasis_core::testkit::Random;
use oasis_transport::disk::ring::Ring;
use oasis_transport::disk::{Memory, PAGE, PagePool, Transfer};
use oasis_transport::stores::{Ssd, SsdIo, SsdStore};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Entries of 8 KiB, as a model with heads of 128 keeps them.
const GEOMETRY: KvGeometry =
    KvGeometry { layers: 32, q_heads: 32, kv_heads: 8, head_dim: 128, block_tokens: 16, dtype: KvDtype::Bf16 };
const ENTRY: usize = 8192;
const REQUEST: RequestId = RequestId(1);
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_secs(2);

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().context("usage: store_bench FOLDER [GIB]")?).join("store_bench");
    let gib: u64 = arguments.next().map_or(Ok(2), |gib| gib.parse()).context("GIB is a whole number")?;
    let blocks = ((gib << 30) as usize / GEOMETRY.layers / GEOMETRY.block_bytes()).max(1);
    let result = run(&folder, blocks);
    std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    result
}

fn run(folder: &Path, blocks: usize) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let spec = |queue_depth| Ssd {
        directory: folder.to_owned(),
        capacity: Bytes(1 << 40),
        queue_depth,
        io: SsdIo::Direct,
        ..Ssd::default()
    };
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    println!("kernel {}, {} cores, {}", kernel.trim(), std::thread::available_parallelism()?, about_disk(folder));

    let store = spec(64).open()?;
    let start = Instant::now();
    runtime.block_on(write(&store, blocks))?;
    drop(store);
    let mib = (GEOMETRY.layers * blocks * GEOMETRY.block_bytes()) as f64 / f64::from(1 << 20);
    println!("put {mib:.0} MiB of KV, to the disk: {:.0} MiB/s", mib / start.elapsed().as_secs_f64());

    for depth in [32, 64] {
        let store = Arc::new(spec(depth).open()?);
        let start = Instant::now();
        let leftover = store.leftovers().pop().context("the store left its file behind")?;
        let adopted = store.adopt(leftover.generation, REQUEST)?;
        ensure!(adopted.len() == GEOMETRY.layers * blocks, "expected all blocks, found {}", adopted.len());
        println!("\ndepth {depth}; adopted, every byte checked: {:.0} MiB/s", mib / start.elapsed().as_secs_f64());
        let path = std::fs::read_dir(folder)?.filter_map(|e| Some(e.ok()?.path())).find(|p| p.extension().is_some());
        compare(&runtime, &store, &path.context("a file of the request")?, depth, blocks)?;
    }
    Ok(())
}

/// One way to read, with what it reached in each round.
type Way<'a> = (&'static str, Box<dyn FnMut() -> anyhow::Result<Option<f64>> + 'a>, Vec<f64>);

fn compare(
    runtime: &tokio::runtime::Runtime,
    store: &Arc<SsdStore>,
    path: &Path,
    depth: usize,
    blocks: usize,
) -> anyhow::Result<()> {
    let keys_from = |mut seed: u64| {
        move |count| {
            seed += 1;
            random_keys(seed, blocks, count)
        }
    };
    let (mut keys, mut keys_too) = (keys_from(0), keys_from(1 << 32));
    let mut ways: Vec<Way<'_>> = vec![
        ("plain io_uring", Box::new(|| plain(path, depth, blocks).map(Some)), Vec::new()),
        ("fio", Box::new(|| fio(path, depth)), Vec::new()),
        (
            "store, 1 fetch of 512 at a time",
            Box::new(|| fetches(runtime, store, &mut keys, 512, 1).map(Some)),
            Vec::new(),
        ),
        ("store, 4 fetches of 128", Box::new(|| fetches(runtime, store, &mut keys_too, 128, 4).map(Some)), Vec::new()),
    ];
    println!("{:34} reads of 8 KiB a second, by round", "");
    for _ in 0..ROUNDS {
        for (_, read, rates) in &mut ways {
            rates.extend(read()?);
        }
    }
    let mut medians = Vec::new();
    for (name, _, rates) in &mut ways {
        let listed: Vec<String> = rates.iter().map(|rate| format!("{rate:9.0}")).collect();
        println!("{name:34} {}", listed.join(" "));
        rates.sort_by(f64::total_cmp);
        medians.push(rates.get(rates.len() / 2).copied());
    }
    let part = |i: usize, of: usize| match (medians[i], medians[of]) {
        (Some(rate), Some(ceiling)) => format!("{:.0}%", 100.0 * rate / ceiling),
        _ => "-".to_owned(),
    };
    println!("medians, 1 fetch:   {} of plain io_uring, {} of fio", part(2, 0), part(2, 1));
    println!("medians, 4 fetches: {} of plain io_uring, {} of fio", part(3, 0), part(3, 1));
    Ok(())
}

async fn write(store: &SsdStore, blocks: usize) -> anyhow::Result<()> {
    let answer = store.reserve(REQUEST, &GEOMETRY, blocks);
    ensure!(answer == Reservation::Granted, "expected room on the disk, found {answer:?}");
    let mut bytes = vec![0; GEOMETRY.block_bytes()];
    for layer in 0..GEOMETRY.layers {
        for block in 0..blocks {
            bytes.chunks_exact_mut(16).enumerate().for_each(|(i, b)| {
                b[..8].copy_from_slice(&((layer * blocks + block) as u64).to_le_bytes());
                b[8..].copy_from_slice(&(i as u64).to_le_bytes());
            });
            let write = BlockWrite { block: BlockId::from(block), bytes: &bytes };
            store.put(REQUEST, LayerId::from(layer), &[write]).await?;
        }
    }
    Ok(())
}

fn random_keys(seed: u64, blocks: usize, count: usize) -> Vec<EntryKey> {
    let mut random = Random::new(seed);
    let mut key = || EntryKey {
        request: REQUEST,
        layer: LayerId::from(random.below(GEOMETRY.layers)),
        block: BlockId::from(random.below(blocks)),
        head: KvHead::from(random.below(GEOMETRY.kv_heads)),
    };
    (0..count).map(|_| key()).collect()
}

/// Reads a second through the store: `at_once` fetches of `count` entries in flight.
fn fetches(
    runtime: &tokio::runtime::Runtime,
    store: &Arc<SsdStore>,
    keys: &mut impl FnMut(usize) -> Vec<EntryKey>,
    count: usize,
    at_once: usize,
) -> anyhow::Result<f64> {
    runtime.block_on(tokio::task::LocalSet::new().run_until(async {
        let (start, mut reads, mut running) = (Instant::now(), 0, JoinSet::new());
        while start.elapsed() < ROUND {
            while running.len() < at_once {
                let (store, keys) = (store.clone(), keys(count));
                running.spawn_local(async move { store.fetch(&keys).await });
            }
            let fetched = running.join_next().await.context("a fetch runs")???;
            reads += fetched.entries.len();
        }
        let rate = reads as f64 / start.elapsed().as_secs_f64();
        running.shutdown().await;
        Ok(rate)
    }))
}

/// Reads a second from a bare ring: the next read starts where one ends, nothing is checked.
fn plain(path: &Path, depth: usize, blocks: usize) -> anyhow::Result<f64> {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file: Arc<File> = Arc::new(OpenOptions::new().read(true).custom_flags(direct).open(path)?);
    let pages = (GEOMETRY.layers * blocks * GEOMETRY.block_bytes() / PAGE) as u64;
    let mut random = Random::new(depth as u64);
    let mut offset = || (u64::from(random.any::<u32>()) % (pages - 1)) * PAGE as u64;
    let mut ring = Ring::new(depth)?;
    let pool = PagePool::new(1 << 30);
    for _ in 0..depth {
        ring.start(Transfer::new(file.clone(), offset(), Memory::Read(pool.take(ENTRY))), ());
    }
    let (start, mut reads) = (Instant::now(), 0);
    while start.elapsed() < ROUND {
        ring.wait()?;
        while let Some((transfer, (), result)) = ring.finished() {
            ensure!(result? == ENTRY, "a short read");
            reads += 1;
            ring.start(Transfer { offset: offset(), ..transfer }, ());
        }
    }
    let rate = reads as f64 / start.elapsed().as_secs_f64();
    while ring.in_flight() > 0 {
        ring.wait()?;
        while ring.finished().is_some() {}
    }
    Ok(rate)
}

/// Reads a second by `fio`, where it is installed.
fn fio(path: &Path, depth: usize) -> anyhow::Result<Option<f64>> {
    let mut fio = Command::new("fio");
    fio.args(["--name=entries", "--rw=randread", "--bs=8k", "--ioengine=io_uring", "--direct=1", "--readonly"]);
    fio.args(["--blockalign=4k", "--time_based", "--output-format=terse", "--terse-version=3"]);
    fio.arg(format!("--runtime={}", ROUND.as_secs())).arg(format!("--iodepth={depth}"));
    let Ok(output) = fio.arg("--filename").arg(path).output() else { return Ok(None) };
    let text = String::from_utf8_lossy(&output.stdout);
    // The eighth field of the terse format is the reads a second.
    let line = text.lines().find(|line| line.starts_with("3;")).context("fio: expected its terse line, found none")?;
    Ok(Some(line.split(';').nth(7).and_then(|field| field.parse().ok()).context("fio: no rate in its line")?))
}

/// File system and block device of a folder, as `findmnt` names them.
fn about_disk(folder: &Path) -> String {
    let parent = folder.parent().unwrap_or(folder);
    let found = Command::new("findmnt").args(["-no", "FSTYPE,SOURCE", "--target"]).arg(parent).output();
    found.map_or_else(
        |_| "unknown disk".to_owned(),
        |o| String::from_utf8_lossy(&o.stdout).split_whitespace().collect::<Vec<_>>().join(" on "),
    )
}
