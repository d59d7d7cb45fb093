//! Decode steps of full batches: what a decode node does while prefill runs elsewhere.

use super::{Bench, Conditions, Subject, expect_admitted, median, sequence};
use crate::args::{GlobalArgs, count, share};
use crate::bench::Longest;
use crate::error::{CliError, CliResult};
use crate::text::columns;
use clap::Args;
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::pipeline::Tracer;
use oasis_cuda::executor::{CudaExecutor, MemoryPlan, StepBytes};
use oasis_cuda::measure::Ceilings;
use oasis_policies::selectors::cap_of;
use serde::Serialize;
use std::io::Write;
use std::time::Instant;

/// Arguments of `bench decode`.
#[derive(Debug, Args)]
pub struct DecodeArgs {
    /// Requests that decode together; several to sweep. Those that do not fit are left out and named
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,16,64", value_parser = count(1))]
    batch: Vec<usize>,
    /// Tokens of each request's context
    #[arg(long, value_name = "TOKENS", default_value_t = 16_384, value_parser = count(1))]
    context: usize,
    /// Most admissions as shares of the budget; several to sweep
    #[arg(long, value_name = "R,...", value_delimiter = ',', default_value = "0.05", value_parser = share)]
    fetch_ratio: Vec<f64>,
    /// Measure dense decoding too
    #[arg(long)]
    dense: bool,
    /// Measure dense decoding only
    #[arg(long)]
    dense_only: bool,
    /// Steps of each measurement
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = count(1))]
    steps: usize,
    /// Say where the time of a step goes: events around every operation, in steps of their own
    #[arg(long)]
    profile: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// What is measured.
    #[command(flatten)]
    pub subject: Subject,
}

/// One measured point.
#[derive(Debug, Serialize)]
struct Point {
    dense: bool,
    batch: usize,
    context: usize,
    /// Most admissions as a share of the budget, and what that is in blocks; absent in dense decoding.
    fetch_ratio: Option<f64>,
    cap: Option<usize>,
    /// Median.
    step_ms: f64,
    tokens_per_second: f64,
    /// Bytes that a step reads from device memory, each once.
    bytes: StepBytes,
    /// Bytes over the link, and how fast.
    link_bytes: f64,
    link_gb_s: f64,
    /// Bytes of device memory over its measured ceiling.
    memory_floor_ms: f64,
    /// Bytes over the link over the measured ceiling of the copy engine.
    link_floor_ms: f64,
    /// `step_ms` over the larger floor.
    over_floor: f64,
    /// Operations of a step, where they were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    operations: Vec<Operation>,
}

/// An operation of a step, over all layers.
#[derive(Debug, Serialize)]
struct Operation {
    track: &'static str,
    name: &'static str,
    /// Milliseconds of a step.
    total_ms: f64,
    /// Mean of one.
    mean_us: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    conditions: Conditions,
    ceilings: Ceilings,
    plans: Vec<MemoryPlan>,
    points: Vec<Point>,
}

/// Steps before each measurement.
const WARM_UP: usize = 4;
/// Steps whose operations are timed one by one.
const PROFILED: usize = 5;

/// Measures and prints.
///
/// # Errors
/// When the input is wrong, nothing fits, or the device fails.
pub fn run(args: &DecodeArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let largest = args.batch.iter().copied().max().unwrap_or(1);
    // Every measurement runs on fresh requests.
    let longest = Longest {
        argument: "--context",
        prompt: args.context,
        after: args.steps + WARM_UP + PROFILED + 2,
        hint: "lower --context or --steps",
    };
    let bench = args.subject.open(global, largest, &longest)?;
    let ceilings = Ceilings::measure(&bench.device()?)?;
    let mut report = Report {
        device: bench.device()?.facts.name.clone(),
        conditions: bench.conditions(),
        ceilings,
        plans: Vec::new(),
        points: Vec::new(),
    };
    let modes: &[bool] = match (args.dense_only, args.dense) {
        (true, _) => &[true],
        (false, true) => &[true, false],
        (false, false) => &[false],
    };
    if !args.json {
        writeln!(out, "{}: {}", report.device, report.conditions.line())?;
        writeln!(
            out,
            "memory read {:.2} TB/s; link {:.1} GB/s to the device, {:.1} GB/s back (copy engine)",
            ceilings.memory_read / 1e12,
            ceilings.host_to_device / 1e9,
            ceilings.device_to_host / 1e9
        )?;
    }
    for dense in modes {
        measure_mode(args, &bench, *dense, &mut report, out)?;
    }
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        write!(out, "\n{}", render(&report.points))?;
    }
    Ok(())
}

fn measure_mode(args: &DecodeArgs, bench: &Bench, dense: bool, report: &mut Report, out: &mut dyn Write) -> CliResult {
    let mut executor = bench.start(bench.options(dense)?)?;
    executor.fill_with_noise(7)?;
    let plan = executor.memory_plan().clone();
    if !args.json {
        writeln!(out, "\n{}: {plan}", if dense { "dense" } else { "sparse" })?;
    }
    let fits = plan.requests;
    report.plans.push(plan);
    let ratios: &[f64] = if dense { &[0.0] } else { &args.fetch_ratio };
    for batch in &args.batch {
        if *batch > fits {
            if !args.json {
                writeln!(out, "batch {batch} is left out: {fits} requests fit")?;
            }
            continue;
        }
        for ratio in ratios {
            crate::interrupt::check()?;
            if let Some(budget) = executor.info().budget_blocks {
                executor.set_cap(cap_of(*ratio, budget).min(budget));
            }
            let point = measure(args, &mut executor, dense, *batch, *ratio, &report.ceilings)?;
            report.points.push(point);
        }
    }
    Ok(())
}

fn measure(
    args: &DecodeArgs,
    executor: &mut CudaExecutor,
    dense: bool,
    batch: usize,
    ratio: f64,
    ceilings: &Ceilings,
) -> CliResult<Point> {
    let vocab = executor.info().vocab;
    let new_tokens = args.steps + WARM_UP + PROFILED + 3;
    let mut rows = Vec::with_capacity(batch);
    for index in 0..batch as u64 {
        // Contexts end at different places of a block, as they do in a real batch.
        let context = args.context - (index as usize * 5) % 16.min(args.context);
        let sequence = sequence(index, context.max(1), new_tokens, vocab);
        expect_admitted(executor.admit_in_the_middle(sequence)?)?;
        rows.push(DecodeRow { request: RequestId(index), token: TokenId(index as u32 % vocab as u32) });
    }
    for _ in 0..WARM_UP {
        step(executor, &mut rows)?;
    }
    let before = executor.stats();
    let mut times = Vec::with_capacity(args.steps);
    for _ in 0..args.steps {
        let start = Instant::now();
        step(executor, &mut rows)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let (after, bytes) = (executor.stats(), executor.step_bytes());
    let operations = if args.profile { profile(executor, &mut rows)? } else { Vec::new() };
    for row in &rows {
        executor.release(row.request);
    }
    let step_ms = median(times);
    let link_bytes = (after.link_bytes - before.link_bytes) as f64 / args.steps as f64;
    let memory_floor_ms = bytes.total() as f64 / ceilings.memory_read * 1e3;
    let link_floor_ms = link_bytes / ceilings.host_to_device * 1e3;
    Ok(Point {
        dense,
        batch,
        context: args.context,
        fetch_ratio: (!dense).then_some(ratio),
        cap: executor.info().budget_blocks.map(|_| executor.info().cap),
        step_ms,
        tokens_per_second: batch as f64 / step_ms * 1e3,
        bytes,
        link_bytes,
        link_gb_s: link_bytes / step_ms / 1e6,
        memory_floor_ms,
        link_floor_ms,
        over_floor: step_ms / memory_floor_ms.max(link_floor_ms),
        operations,
    })
}

/// Where the time of a step goes; the first steps are left out.
fn profile(executor: &mut CudaExecutor, rows: &mut [DecodeRow]) -> CliResult<Vec<Operation>> {
    let tracer = Tracer::recording();
    executor.set_tracer(tracer.clone());
    for _ in 0..PROFILED {
        step(executor, rows)?;
    }
    executor.set_tracer(Tracer::default());
    let spans = tracer.spans();
    let last = spans.iter().map(|span| span.step.0).max().unwrap_or(0);
    let mut operations: Vec<Operation> = Vec::new();
    for span in spans.iter().filter(|span| span.step.0 == last) {
        let found = operations.iter_mut().find(|o| (o.track, o.name) == (span.track.name(), span.name));
        match found {
            // `mean_us` counts until the end.
            Some(operation) => {
                operation.total_ms += span.duration_us / 1e3;
                operation.mean_us += 1.0;
            }
            None => operations.push(Operation {
                track: span.track.name(),
                name: span.name,
                total_ms: span.duration_us / 1e3,
                mean_us: 1.0,
            }),
        }
    }
    for operation in &mut operations {
        operation.mean_us = operation.total_ms * 1e3 / operation.mean_us;
    }
    Ok(operations)
}

fn step(executor: &mut CudaExecutor, rows: &mut [DecodeRow]) -> CliResult {
    let tokens = executor.decode(rows)?;
    for (row, token) in rows.iter_mut().zip(tokens) {
        row.token = token.map_err(|error| CliError::Failure(error.to_string()))?;
    }
    Ok(())
}

fn render(points: &[Point]) -> String {
    let header = [
        "mode",
        "batch",
        "context",
        "ratio",
        "C",
        "step",
        "tokens/s",
        "link",
        "GB/s",
        "memory floor",
        "link floor",
        "over floor",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for p in points {
        rows.push(vec![
            if p.dense { "dense" } else { "sparse" }.to_owned(),
            p.batch.to_string(),
            p.context.to_string(),
            p.fetch_ratio.map_or_else(String::new, |ratio| ratio.to_string()),
            p.cap.map_or_else(String::new, |cap| cap.to_string()),
            format!("{:.2} ms", p.step_ms),
            format!("{:.0}", p.tokens_per_second),
            format!("{:.3} GB", p.link_bytes / 1e9),
            format!("{:.1}", p.link_gb_s),
            format!("{:.2} ms", p.memory_floor_ms),
            format!("{:.2} ms", p.link_floor_ms),
            format!("{:.2} x", p.over_floor),
        ]);
    }
    let mut text = columns(&rows).join("\n") + "\n";
    for p in points.iter().filter(|p| !p.operations.is_empty()) {
        let mode = if p.dense { "dense" } else { "sparse" };
        text.push_str(&format!("\noperations of a {mode} step, batch {}, C {}:\n", p.batch, p.cap.unwrap_or(0)));
        let rows: Vec<Vec<String>> = (p.operations.iter())
            .map(|o| {
                let times = [format!("{:.3} ms", o.total_ms), format!("{:.1} us each", o.mean_us)];
                [o.track.to_owned(), o.name.to_owned()].into_iter().chain(times).collect()
            })
            .collect();
        text.push_str(&(columns(&rows).join("\n") + "\n"));
    }
    text
}
