//! Decode steps whose KV lies in host memory, beside steps whose KV lies on a disk with part of it in host memory.
//!
//! `tiered_steps MODEL DRAFT CONTEXT STEPS FOLDER SHARE...`: the `tiered` store holds such shares of the prompt's KV in
//! host memory and everything in an `ssd` store in FOLDER, read past the page cache. All decode from one prefill, in turns
//! of a few steps, so that whatever else the machine does touches them alike.

use oasis_core::config::Bytes;
use oasis_core::executor::Executor;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::memory::{KvStore, StoreMetrics, StoreSpec};
use oasis_core::pipeline::Tracer;
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::{CpuExecutor, Residency, SparseParts};
use oasis_tests::models::{load, options, parts, read, step};
use oasis_tests::prompts::text_for;
use oasis_transport::stores::{Dram, Ssd, SsdIo, Tiered};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Usual budget, 2,048 tokens.
const BUDGET: usize = 128;
/// Steps of one store before the next has its turn.
const TURN: usize = 8;
const STAGING: u64 = 64 << 20;
const REQUEST: RequestId = RequestId(1);

struct Side {
    name: String,
    store: Arc<dyn KvStore>,
    executor: CpuExecutor,
    tokens: Vec<TokenId>,
    before: StoreMetrics,
    waited: f64,
    times: Vec<f64>,
}

fn store(share: Option<f64>, bytes: u64, folder: &Path) -> Arc<dyn KvStore> {
    match share {
        None => Dram { capacity: Bytes(64 << 30) }.build().expect("a store"),
        Some(share) => {
            let directory = folder.join(format!("{share}"));
            let backing = Box::new(Ssd { directory, io: SsdIo::Direct, ..Ssd::default() });
            let dram = Bytes(STAGING + (share * bytes as f64) as u64);
            Tiered { dram, staging: Bytes(STAGING), backing }.build().expect("io_uring and O_DIRECT in the folder")
        }
    }
}

fn percentile(times: &[f64], share: f64) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, draft, context, steps, folder, shares @ ..] = &args[..] else { usage() };
    let (Ok(context), Ok(steps)) = (context.parse::<usize>(), steps.parse::<usize>()) else { usage() };
    let shares: Vec<f64> = shares.iter().map(|share| share.parse().unwrap_or_else(|_| usage())).collect();
    let weights = load(model, Some(draft));
    let prompt = text_for(model, context);
    let state = read(&weights, &prompt, 512);
    let rounds = steps.div_ceil(TURN);
    let folder = Path::new(folder).join("tiered_steps");
    let mut bytes = 0;
    let mut sides: Vec<Side> = Vec::new();
    for share in std::iter::once(None).chain(shares.into_iter().map(Some)) {
        let store = store(share, bytes, &folder);
        let parts = SparseParts { store: store.clone(), ..parts(&weights, BUDGET, 16, &[]) };
        let executor = CpuExecutor::new(weights.clone(), Residency::Sparse(parts), options(512), Tracer::default());
        let mut executor = executor.expect("parts that fit");
        bytes = executor.info().geometry.dense_bytes(context);
        let room = rounds * (TURN + 1) + 4;
        let first = executor.resume(&state, REQUEST, room, SamplingParams::default()).expect("room");
        let name = share.map_or("dram".to_owned(), |share| format!("tiered, {:.0}% in memory", share * 100.0));
        let (before, times) = (StoreMetrics::default(), Vec::new());
        sides.push(Side { name, store, executor, tokens: vec![first], before, waited: 0.0, times });
    }
    for side in &mut sides {
        // The first reads the full KV.
        for _ in 0..2 {
            side.step();
        }
        side.before = side.store.metrics();
        side.waited = side.wait();
    }
    for _ in 0..rounds {
        for side in &mut sides {
            // The first step of a turn still pays for the side before it.
            side.step();
            for _ in 0..TURN {
                let start = Instant::now();
                side.step();
                side.times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let budget = format!("K = {BUDGET} blocks of 16 tokens, fetch ratio 0.05");
    println!("{model}, {draft}: {context} tokens of prompt, {steps} steps each, {budget}, {} MiB of KV\n", bytes >> 20);
    println!("store                   hits of entries  hit rate  step ms  10%     90%     waits ms  over dram  tokens");
    let (base, tokens) = (percentile(&sides[0].times, 0.5), sides[0].tokens.clone());
    for side in &sides {
        let metrics = side.store.metrics();
        let (hits, misses) = (metrics.hits - side.before.hits, metrics.misses - side.before.misses);
        let rate = hits as f64 * 100.0 / ((hits + misses) as f64).max(1.0);
        let median = percentile(&side.times, 0.5);
        println!(
            "{:<22}  {:>15}  {rate:>7.1}%  {median:>7.2}  {:>6.2}  {:>6.2}  {:>8.2}  {:>7.3} x  {}",
            side.name,
            format!("{hits} of {}", hits + misses),
            percentile(&side.times, 0.1),
            percentile(&side.times, 0.9),
            (side.wait() - side.waited) * 1e3 / (rounds * (TURN + 1)) as f64,
            median / base,
            if side.tokens == tokens { "same" } else { "OTHER" },
        );
    }
    drop(sides);
    std::fs::remove_dir_all(&folder).unwrap_or_else(|error| eprintln!("{}: {error}", folder.display()));
}

impl Side {
    fn step(&mut self) {
        let last = *self.tokens.last().expect("the first token");
        self.tokens.push(step(&mut self.executor, REQUEST, last));
    }

    /// Seconds that the foreground has waited for layers.
    fn wait(&self) -> f64 {
        self.executor.stats().pipeline.unwrap_or_default().foreground_wait.as_secs_f64()
    }
}

fn usage() -> ! {
    eprintln!("usage: tiered_steps MODEL DRAFT CONTEXT STEPS FOLDER SHARE...");
    std::process::exit(2);
}
