//! Rates of one-sided reads from another process: entries of 8 KiB in batches of a layer, as nodes read them, beside reads
//! of 1 MiB by the same library. Nodes read whole blocks, in which the entries of all KV heads lie side by side; entries
//! that lie alone are measured as well.
//!
//! ```sh
//! cargo run --release -p oasis-ucx --example ucx_rates -- tcp
//! ```
//!
//! With `rdma`, or `rdma DEVICE` such as `rdma mlx5_0:1`, an RDMA adapter carries the reads, here in loopback. Kinds of
//! reads take turns, five rounds of each; what the last line compares are medians. Every byte of the first batch of
//! each kind and round is checked. Leave the machine idle meanwhile.

use oasis_ucx::{Access, Descriptor, Engine, Peer, Pool, Search, Segment, Settings, Wire, prepare_environment};
use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const POOL: usize = 256 << 20;
const LANDING: usize = BATCHES * (64 << 20);
/// Batches in flight at once, as an admission keeps them.
const BATCHES: usize = 4;
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(30);
/// What is read, bytes of a read, and reads of a batch; the first is what the others are compared with.
const KINDS: [(&str, usize, usize); 4] = [
    ("1 MiB", 1 << 20, 64),
    ("8 entries of 8 KiB, a block", 64 << 10, 128),
    ("one entry of 8 KiB", 8 << 10, 1024),
    ("one entry of 8 KiB", 8 << 10, 128),
];

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    prepare_environment();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (role, rest) = match arguments.first().map(String::as_str) {
        Some("owner") => ("owner", &arguments[1..]),
        _ => ("reader", &arguments[..]),
    };
    let wire = match rest.first().map(String::as_str) {
        Some("tcp") => Wire::Tcp,
        Some("rdma") => Wire::Rdma,
        _ => return Err("usage: ucx_rates tcp|rdma [DEVICE]".into()),
    };
    let settings = Settings { search: Search::default(), wire, device: rest.get(1).cloned() };
    match role {
        "owner" => lend(&settings),
        _ => measure(&settings, rest),
    }
}

/// What lies at word `index` of the owner's memory.
fn word(index: usize) -> u64 {
    (index as u64 ^ 0x5bd1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn lend(settings: &Settings) -> Outcome<()> {
    let engine = Engine::start(settings)?;
    // A little more than the memory that is read: ranges are rounded up.
    let pool = engine.pool(POOL, Access::Lent)?;
    let mut memory = pool.take(POOL).ok_or("no room")?;
    for (index, bytes) in memory.bytes_mut().chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word(index).to_le_bytes());
    }
    let hex: String = pool.descriptor().encode().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{hex}");
    // Until the reader is done with it.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn measure(settings: &Settings, arguments: &[String]) -> Outcome<()> {
    let mut command = Command::new(std::env::current_exe()?);
    let mut owner = command.arg("owner").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(owner.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let digits = line.trim_end().as_bytes().chunks(2);
    let bytes = digits.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?));
    let descriptor = Descriptor::decode(&bytes.collect::<Outcome<Vec<u8>>>()?)?;

    let engine = Engine::start(settings)?;
    let landing = engine.pool(LANDING, Access::Landing)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let cores = std::thread::available_parallelism()?;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let (version, wire) = (engine.version(), arguments.join(" "));
    println!("UCX {version}, {wire}, {cores} cores, load average {}; {BATCHES} batches in flight", load.trim());
    let rates = runtime.block_on(async {
        let peer = engine.connect(descriptor).await?;
        let mut rates = KINDS.map(|_| Vec::new());
        for round in 0..ROUNDS {
            for ((_, bytes, count), rates) in KINDS.into_iter().zip(&mut rates) {
                rates.push(rate(&engine, &landing, peer, bytes, count, round).await?);
            }
        }
        Ok::<_, Box<dyn Error>>(rates)
    })?;
    drop(owner.stdin.take());
    owner.wait()?;
    report(rates);
    Ok(())
}

/// GB/s of one kind for the length of a round.
async fn rate(engine: &Engine, landing: &Pool, peer: Peer, bytes: usize, count: usize, round: usize) -> Outcome<f64> {
    // An odd stride visits every place once, and no two neighbours one after the other.
    let place = |batch: usize, i: usize| (round + batch * count + i) * 97 % (POOL / bytes) * bytes;
    let read = |batch: usize| {
        let segment = move |i| Segment { local: i * bytes, remote: place(batch, i) as u64, len: bytes };
        let (segments, buffer) = ((0..count).map(segment).collect(), landing.take(bytes * count));
        async move { Ok::<_, Box<dyn Error>>(engine.read(peer, segments, buffer.ok_or("no room")?, LIMIT).await?) }
    };
    // The first batch is checked and not counted.
    for (i, entry) in read(0).await?.bytes().chunks_exact(bytes).enumerate() {
        let first = place(0, i) / 8;
        if !entry.chunks_exact(8).enumerate().all(|(at, found)| found == word(first + at).to_le_bytes()) {
            return Err(format!("entry {i} of {bytes} bytes has other bytes than its owner").into());
        }
    }
    let start = Instant::now();
    let lane = async |lane: usize| {
        let mut batches = 0;
        while start.elapsed() < ROUND {
            read(1 + lane + batches * BATCHES).await?;
            batches += 1;
        }
        Ok::<_, Box<dyn Error>>(batches)
    };
    let (a, b, c, d) = tokio::try_join!(lane(0), lane(1), lane(2), lane(3))?;
    Ok(((a + b + c + d) * count * bytes) as f64 / start.elapsed().as_secs_f64() / 1e9)
}

fn report(mut rates: [Vec<f64>; KINDS.len()]) {
    println!("\n{:<45}GB/s by round{:>41}", "", "median   of 1 MiB reads");
    let mut reference = 0.0;
    for ((what, _, count), rates) in KINDS.into_iter().zip(&mut rates) {
        let rounds: String = rates.iter().map(|rate| format!("{rate:>9.3}")).collect();
        rates.sort_by(f64::total_cmp);
        let median = rates[ROUNDS / 2];
        if reference == 0.0 {
            reference = median;
        }
        let kind = format!("{count} x {what}, scattered");
        println!("{kind:<45}{rounds}{median:>12.3}{:>14.0}%", median * 100.0 / reference);
    }
}
