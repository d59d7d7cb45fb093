//! What would cross between a prefill and a decode node: the blocks that a GPU's selections ask for, each once.

use super::{Bench, Conditions, Subject, expect_admitted, median, sequence};
use crate::args::{GlobalArgs, count, share};
use crate::bench::Longest;
use crate::error::{CliError, CliResult};
use crate::generate::read_prompt;
use crate::text::columns;
use clap::Args;
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, RequestId, TokenId};
use oasis_core::working_set::BlockSet;
use oasis_cuda::executor::CudaExecutor;
use oasis_cuda::layout::entry_bytes;
use oasis_policies::selectors::cap_of;
use serde::Serialize;
use std::io::Write;
use std::time::Instant;

/// Arguments of `bench traffic`.
#[derive(Debug, Args)]
pub struct TrafficArgs {
    /// Prompt tokens; several to sweep
    #[arg(long, value_name = "TOKENS,...", value_delimiter = ',', default_value = "24576,32000", value_parser = count(1))]
    context: Vec<usize>,
    /// Most admissions as shares of the budget, 1 for no cap; several to sweep
    #[arg(long, value_name = "R,...", value_delimiter = ',', default_value = "0.05,0.1,1", value_parser = share)]
    fetch_ratio: Vec<f64>,
    /// Decode steps of each measurement
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = count(1))]
    steps: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// What is measured.
    #[command(flatten)]
    pub subject: Subject,
}

/// One request under one cap. Bytes are of bf16 KV.
#[derive(Debug, Serialize)]
struct Point {
    context: usize,
    fetch_ratio: f64,
    cap: usize,
    /// All blocks of the prompt: what full transfer brings before the first step of the decode node.
    full_bytes: u64,
    /// Blocks that some KV head's first choice has: what partial transfer brings then.
    admission_bytes: u64,
    /// Summaries and the draft head's KV, which come either way.
    state_bytes: u64,
    /// Blocks that came later.
    miss_bytes: u64,
    /// Bytes that came with each decode step after the first.
    step_bytes: Vec<u64>,
    /// Median milliseconds of a step.
    step_ms: f64,
}

impl Point {
    fn quantile(&self, share: f64) -> u64 {
        let mut bytes = self.step_bytes.clone();
        bytes.sort_unstable();
        bytes.get(((bytes.len() as f64 * share) as usize).min(bytes.len().saturating_sub(1))).copied().unwrap_or(0)
    }

    fn idle(&self) -> f64 {
        self.step_bytes.iter().filter(|bytes| **bytes == 0).count() as f64 / self.step_bytes.len().max(1) as f64
    }
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    conditions: Conditions,
    points: Vec<Point>,
}

/// Measures and prints.
///
/// # Errors
/// When the input is wrong, a prompt does not fit, or the device fails.
pub fn run(args: &TrafficArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let longest = Longest {
        argument: "--context",
        prompt: args.context.iter().copied().max().unwrap_or(1),
        after: args.steps + 2,
        hint: "lower --context or --steps",
    };
    let bench = args.subject.open(global, 1, &longest)?;
    let mut executor = bench.start(bench.options(false)?)?;
    let Some(budget) = executor.info().budget_blocks else {
        return Err(CliError::input(
            "kv.budget_blocks: expected a number of blocks, found \"all\"",
            "dense decoding has no choice of blocks that could cross alone",
        ));
    };
    let mut points = Vec::new();
    for context in &args.context {
        for ratio in &args.fetch_ratio {
            executor.set_cap(cap_of(*ratio, budget));
            points.push(measure(args, &bench, &mut executor, *context, *ratio, points.len() as u64)?);
        }
    }
    let report = Report { device: executor.info().device.clone(), conditions: bench.conditions(), points };
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        return Ok(writeln!(out)?);
    }
    writeln!(out, "{}: {}; prompts of random tokens\n", report.device, report.conditions.line())?;
    Ok(writeln!(out, "{}", columns(&table(&report.points)).join("\n"))?)
}

/// What has crossed, a layer.
struct Crossed {
    layers: Vec<BlockSet>,
    geometry: KvGeometry,
    prompt_blocks: usize,
}

impl Crossed {
    /// Bytes of the blocks that the working sets hold now and that have not crossed; they have after that.
    fn update(&mut self, executor: &CudaExecutor, request: RequestId) -> CliResult<u64> {
        let mut blocks = 0;
        for (layer, crossed) in self.layers.iter_mut().enumerate() {
            let selection = executor.selection(request, layer)?;
            let Some(selection) = selection else {
                return Err(CliError::Failure(format!("layer {layer} of a decoding request has no selection")));
            };
            // Those that decoding completes are made where they are used.
            let held = selection.blocks.iter().flatten().filter_map(|block| u32::try_from(*block).ok());
            blocks += held
                .filter(|block| (*block as usize) < self.prompt_blocks && crossed.insert(BlockId(*block)))
                .count() as u64;
        }
        Ok(blocks * self.block_bytes())
    }

    /// One block of one layer, all KV heads.
    fn block_bytes(&self) -> u64 {
        (self.geometry.kv_heads * entry_bytes(self.geometry.head_dim)) as u64
    }
}

fn measure(
    args: &TrafficArgs,
    bench: &Bench,
    executor: &mut CudaExecutor,
    context: usize,
    fetch_ratio: f64,
    id: u64,
) -> CliResult<Point> {
    let (request, geometry) = (RequestId(id), executor.info().geometry);
    // The same prompt for each cap.
    let prompt = sequence(0, context, args.steps + 2, bench.spec.vocab);
    expect_admitted(executor.admit(oasis_core::executor::Sequence { request, ..prompt })?)?;
    let mut token = read_prompt(executor, request)?;
    let mut step = |executor: &mut CudaExecutor| -> CliResult<f64> {
        crate::interrupt::check()?;
        let start = Instant::now();
        let next: Result<TokenId, _> = executor.decode(&[DecodeRow { request, token }])?.remove(0);
        token = next.map_err(|error| CliError::Failure(error.to_string()))?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    // The prefill node's: it sees everything and chooses.
    step(executor)?;
    let prompt_blocks = geometry.full_blocks(context);
    let layers = (0..geometry.layers).map(|_| BlockSet::default()).collect();
    let mut crossed = Crossed { layers, geometry, prompt_blocks };
    let admission_bytes = crossed.update(executor, request)?;
    let full_bytes = (geometry.layers * prompt_blocks) as u64 * crossed.block_bytes();
    let state = executor.step_bytes();
    let (mut times, mut step_bytes) = (Vec::new(), Vec::new());
    for _ in 0..args.steps {
        times.push(step(executor)?);
        step_bytes.push(crossed.update(executor, request)?);
    }
    let cap = executor.info().cap;
    executor.release(request);
    Ok(Point {
        context,
        fetch_ratio,
        cap,
        full_bytes,
        admission_bytes,
        state_bytes: state.summaries + state.draft,
        miss_bytes: step_bytes.iter().sum(),
        step_bytes,
        step_ms: median(times),
    })
}

fn table(points: &[Point]) -> Vec<Vec<String>> {
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    let times = |full: u64, part: u64| format!("{:.1} x less", full as f64 / part.max(1) as f64);
    let header = [
        "prompt",
        "ratio",
        "C",
        "full MiB",
        "admission",
        "",
        "misses",
        "in all",
        "",
        "state",
        "MiB/step median",
        "90%",
        "most",
        "idle steps",
        "ms/step",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for p in points {
        let all = p.admission_bytes + p.miss_bytes;
        rows.push(vec![
            p.context.to_string(),
            p.fetch_ratio.to_string(),
            p.cap.to_string(),
            mib(p.full_bytes),
            mib(p.admission_bytes),
            times(p.full_bytes, p.admission_bytes),
            mib(p.miss_bytes),
            mib(all),
            times(p.full_bytes, all),
            mib(p.state_bytes),
            mib(p.quantile(0.5)),
            mib(p.quantile(0.9)),
            mib(p.quantile(1.0)),
            format!("{:.0}%", p.idle() * 100.0),
            format!("{:.2}", p.step_ms),
        ]);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_says_how_much_less_crosses_and_when() {
        let mib = 1 << 20;
        let point = Point {
            context: 1024,
            fetch_ratio: 0.5,
            cap: 4,
            full_bytes: 64 * mib,
            admission_bytes: 8 * mib,
            state_bytes: mib,
            miss_bytes: 8 * mib,
            step_bytes: vec![0, 5 * mib, 0, 3 * mib],
            step_ms: 2.0,
        };
        let rows = table(&[point]);
        let row: Vec<&str> = rows[1].iter().map(String::as_str).collect();
        assert_eq!(
            row,
            [
                "1024",
                "0.5",
                "4",
                "64.0",
                "8.0",
                "8.0 x less",
                "8.0",
                "16.0",
                "4.0 x less",
                "1.0",
                "3.0",
                "5.0",
                "5.0",
                "50%",
                "2.00"
            ]
        );
    }
}
