//! What a prefill and a decode node say to each other when requests come at a rate: bytes, bandwidth over time, memory.
//! Full against partial transfer, by fetch cap, over a link of limited bandwidth (the paper's Fig. 12 and 14).
//!
//! `node_load MODEL DRAFT CONTEXT TOKENS REQUESTS SECONDS MBIT`: a request every so many seconds, a link of so many 10^6
//! bits a second.

use oasis_core::engine::Event;
use oasis_core::ids::{RequestId, TokenId};
use oasis_nodes::TransferMode;
use oasis_tests::drive::request;
use oasis_tests::models::{load, options};
use oasis_tests::nodes::{Network, Setup};
use oasis_tests::prompts::text_for;
use oasis_transport::remote::NodeMetrics;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Usual budget, 2,048 tokens.
const BUDGET: usize = 128;
/// Bandwidth is that of windows of this length.
const WINDOW: Duration = Duration::from_millis(500);
/// Each request's prompt begins so many tokens later in the text than the one before.
const SHIFT: usize = 1111;

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

/// Bytes that passed in each window.
struct Sampler {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<u64>>,
}

impl Sampler {
    fn start(network: Arc<Network>) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let (start, mut before, mut windows) = (Instant::now(), network.passed(), Vec::new());
            while !stopped.load(Ordering::SeqCst) {
                let end = start + WINDOW * (windows.len() as u32 + 1);
                std::thread::sleep(end.saturating_duration_since(Instant::now()));
                let passed = network.passed();
                windows.push(passed - before);
                before = passed;
            }
            windows
        });
        Self { stop, thread }
    }

    fn finish(self) -> Vec<u64> {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("the sampler has no reason to panic")
    }
}

struct Load {
    prompts: Vec<Vec<TokenId>>,
    tokens: usize,
    every: Duration,
    rate: u64,
}

/// What one setting gave.
struct Outcome {
    answers: Vec<Vec<TokenId>>,
    metrics: Vec<NodeMetrics>,
    /// From the first request's first byte, without the progress reports of prompts, to the last token.
    windows: Vec<u64>,
    store_peak: u64,
    seconds: f64,
}

impl Load {
    fn run(&self, setup: &Setup, transfer: TransferMode) -> Outcome {
        let prefill = setup.prefill();
        let network = Arc::new(Network::new(prefill.address()));
        network.limit(self.rate);
        let mut decode = setup.decode(network.address(), transfer);
        let sampler = Sampler::start(network.clone());
        let (start, mut submitted, mut ended) = (Instant::now(), 0, 0);
        let mut answers: BTreeMap<RequestId, Vec<TokenId>> = BTreeMap::new();
        while ended < self.prompts.len() {
            if submitted < self.prompts.len() && start.elapsed() >= self.every * submitted as u32 {
                decode.submit(request(&self.prompts[submitted], self.tokens)).expect("a request that fits");
                submitted += 1;
            }
            if decode.is_idle() {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            for event in decode.step().expect("the CPU is not lost") {
                match event {
                    Event::Prefill { .. } => {}
                    Event::Token { request, token } => answers.entry(request).or_default().push(token),
                    Event::Finished { .. } => ended += 1,
                    Event::Refused { request, reason: error } | Event::Failed { request, error } => {
                        panic!("request {request}: {error}")
                    }
                }
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        let metrics = answers.keys().map(|id| decode.executor().metrics(*id).expect("a request of ours")).collect();
        // Reports of progress alone are far less.
        let windows = sampler.finish().into_iter().skip_while(|bytes| *bytes < 100_000).collect();
        let store_peak = decode.executor().store().peak_bytes();
        Outcome { answers: answers.into_values().collect(), metrics, windows, store_peak, seconds }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, draft, numbers @ ..] = &args[..] else { usage() };
    let numbers: Vec<usize> = numbers.iter().map(|text| text.parse().unwrap_or_else(|_| usage())).collect();
    let [context, tokens, requests, seconds, mbit] = numbers[..] else { usage() };
    let text = text_for(model, context + SHIFT * (requests - 1));
    let load_ = Load {
        prompts: (0..requests).map(|index| text[index * SHIFT..][..context].to_vec()).collect(),
        tokens,
        every: Duration::from_secs(seconds as u64),
        rate: mbit as u64 * 1_000_000 / 8,
    };
    let weights = load(model, Some(draft));
    println!(
        "{model}, {draft}: {requests} requests, one every {seconds} s, {context} tokens of prompt, {tokens} generated, \
         K = {BUDGET} blocks of 16 tokens, f32 KV, a link of {mbit} Mbit/s, windows of {} ms\n",
        WINDOW.as_millis()
    );
    println!(
        "MiB a request                                                  MiB/s over time            decode-side MiB"
    );
    println!(
        "transfer  cap   admission  state  misses  all     less   average  median  peak   idle   a request  peak    s    \
         tokens"
    );
    let (mut first_all, mut first_answers) = (None, None);
    for (transfer, cap) in [
        (TransferMode::Full, "0.05"),
        (TransferMode::Partial, "none"),
        (TransferMode::Partial, "0.1"),
        (TransferMode::Partial, "0.05"),
    ] {
        let selector = match cap {
            "none" => "selector.kind=fetch-all".to_owned(),
            ratio => format!("selector.fetch_ratio={ratio}"),
        };
        let mut setup = Setup::new(weights.clone(), options(512), BUDGET, &[&selector]);
        setup.staging = 8 << 30;
        setup.timeout = Duration::from_secs(60);
        (setup.lease, setup.prefill_timeout) = (Duration::from_secs(120), Duration::from_secs(1200));
        let Outcome { answers, metrics, windows, store_peak, seconds } = load_.run(&setup, transfer);
        let mean = |of: fn(&NodeMetrics) -> u64| mib(metrics.iter().map(of).sum::<u64>() as f64 / requests as f64);
        let (admission, state, misses) = (mean(|m| m.admission_bytes), mean(|m| m.state_bytes), mean(|m| m.miss_bytes));
        let all = admission + state + misses;
        let mut rates: Vec<f64> = windows.iter().map(|bytes| mib(*bytes as f64) / WINDOW.as_secs_f64()).collect();
        // Hardly more than signs of life.
        let idle = rates.iter().filter(|rate| **rate < 0.01).count() as f64 * 100.0 / rates.len() as f64;
        rates.sort_by(f64::total_cmp);
        let average = rates.iter().sum::<f64>() / rates.len() as f64;
        let said = match &first_answers {
            _ if cap != "0.05" => "-",
            None => "first",
            Some(first) if *first == answers => "same",
            Some(_) => "OTHER",
        };
        println!(
            "{:<8}  {cap:<4}  {admission:>9.2}  {state:>5.2}  {misses:>6.2}  {all:>6.2}  {:>4.2} x  {average:>7.2}  \
             {:>6.2}  {:>5.2}  {idle:>4.0}%  {:>9.2}  {:>6.2}  {seconds:>3.0}  {said}",
            format!("{transfer:?}").to_lowercase(),
            first_all.unwrap_or(all) / all,
            rates[rates.len() / 2],
            rates[rates.len() - 1],
            mean(|m| m.resident_bytes),
            mib(store_peak as f64),
        );
        first_all = first_all.or(Some(all));
        first_answers = first_answers.or(Some(answers));
    }
}

fn usage() -> ! {
    eprintln!("usage: node_load MODEL DRAFT CONTEXT TOKENS REQUESTS SECONDS MBIT");
    std::process::exit(2);
}
