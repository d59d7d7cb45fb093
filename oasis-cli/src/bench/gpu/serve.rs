//! A closed loop in its steady state: a number of requests at a time, each read, decoded and followed by the next.

use super::prefill::products;
use super::{Bench, Conditions, Subject, expect_admitted, sequence};
use crate::args::{GlobalArgs, count};
use crate::bench::Longest;
use crate::error::{CliError, CliResult};
use crate::generate::read_prompt;
use crate::text::columns;
use clap::Args;
use oasis_core::executor::{Admission, DecodeRow, Executor, PrefillProgress};
use oasis_core::ids::{RequestId, TokenId};
use oasis_cuda::executor::{CudaExecutor, MemoryPlan};
use oasis_cuda::measure::Ceilings;
use oasis_cuda::measure::kernels::TENSOR_FLOPS;
use serde::Serialize;
use std::io::Write;
use std::time::{Duration, Instant};

/// Arguments of `bench serve-sim`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Tokens of each prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 16_384, value_parser = count(1))]
    input: usize,
    /// Tokens of each answer, at least 4
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = count(4))]
    output: usize,
    /// Requests at a time; several to sweep
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,16,128", value_parser = count(1))]
    concurrency: Vec<usize>,
    /// Seconds of each measurement
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = count(1))]
    seconds: usize,
    /// Dense decoding instead of sparse
    #[arg(long)]
    dense: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// What is measured.
    #[command(flatten)]
    pub subject: Subject,
}

/// One measured concurrency.
#[derive(Debug, Default, Serialize)]
struct Point {
    concurrency: usize,
    /// Most that ran at once.
    running: usize,
    seconds: f64,
    output_tokens: u64,
    finished: u64,
    prefills: u64,
    output_tokens_per_second: f64,
    /// Output tokens of as many requests as prompts were read: in the long run no more can be answered.
    sustained_tokens_per_second: f64,
    /// Mean milliseconds from a request's token to its next.
    per_token_ms: f64,
    /// Mean milliseconds from the admission to the first token.
    first_token_ms: f64,
    floor: Floor,
    /// `output_tokens_per_second` of those that the floor allows.
    of_floor: f64,
}

/// Least milliseconds that a request keeps each part of the machine busy. Where all of it overlaps the largest is what
/// counts.
#[derive(Debug, Default, Serialize)]
struct Floor {
    /// The arithmetic of its prompt, at the speed of the tensor cores.
    prompt_ms: f64,
    /// Its share of what the steps of its answer read, at the measured speed of device memory.
    memory_ms: f64,
    /// Its bytes over the link, at the measured speed of the copy engine.
    link_ms: f64,
}

impl Floor {
    /// Output tokens a second of answers of `output` tokens.
    fn tokens_per_second(&self, output: usize) -> f64 {
        output as f64 / self.prompt_ms.max(self.memory_ms).max(self.link_ms) * 1e3
    }
}

impl Point {
    /// Whether about as many requests began as ended. Where far fewer began, the batch was shrinking, and the rate is one
    /// that prefills cannot keep up with.
    fn is_balanced(&self) -> bool {
        self.finished <= self.prefills + 1 + self.prefills / 10
    }
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    conditions: Conditions,
    mode: &'static str,
    cap: usize,
    ceilings: Ceilings,
    input: usize,
    output: usize,
    plan: MemoryPlan,
    points: Vec<Point>,
}

/// Measures and prints.
///
/// # Errors
/// When the input is wrong, no request fits, or the device fails.
pub fn run(args: &ServeArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let most = args.concurrency.iter().copied().max().unwrap_or(1);
    let longest =
        Longest { argument: "--input", prompt: args.input, after: args.output, hint: "lower --input or --output" };
    let bench = args.subject.open(global, most, &longest)?;
    let ceilings = Ceilings::measure(&bench.device()?)?;
    let mut executor = bench.start(bench.options(args.dense)?)?;
    executor.fill_with_noise(7)?;
    warm_up(args, &bench, &mut executor)?;
    let mut points = Vec::new();
    for concurrency in &args.concurrency {
        let mut run = Loop::new(args, &mut executor, *concurrency);
        let mut point = run.measure(&ceilings)?;
        run.end();
        point.floor.prompt_ms = products(&bench.spec, args.input) / TENSOR_FLOPS * 1e3;
        point.of_floor = point.output_tokens_per_second / point.floor.tokens_per_second(args.output);
        points.push(point);
    }
    let report = Report {
        device: executor.info().device.clone(),
        conditions: bench.conditions(),
        mode: if args.dense { "dense" } else { "sparse" },
        cap: executor.info().cap,
        ceilings,
        input: args.input,
        output: args.output,
        plan: executor.memory_plan().clone(),
        points,
    };
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        return Ok(writeln!(out)?);
    }
    writeln!(out, "{}: {}", report.device, report.conditions.line())?;
    writeln!(out, "{}\n", report.plan)?;
    writeln!(
        out,
        "{}, {} tokens in, {} out, cap {}; prefill included",
        report.mode, report.input, report.output, report.cap
    )?;
    let header =
        ["concurrency", "running", "tokens/s", "per token", "first token", "finished", "prefills", "floor", "of it"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for p in &report.points {
        rows.push(vec![
            p.concurrency.to_string(),
            p.running.to_string(),
            format!("{:.0}", p.output_tokens_per_second),
            format!("{:.2} ms", p.per_token_ms),
            format!("{:.0} ms", p.first_token_ms),
            p.finished.to_string(),
            p.prefills.to_string(),
            format!("{:.0}", p.floor.tokens_per_second(args.output)),
            format!("{:.2}", p.of_floor),
        ]);
    }
    writeln!(out, "{}", columns(&rows).join("\n"))?;
    writeln!(
        out,
        "floor: tokens/s where a prompt's arithmetic, what steps read and the link overlap wholly; memory read {:.2} TB/s, \
         link {:.1} GB/s",
        ceilings.memory_read / 1e12,
        ceilings.host_to_device / 1e9
    )?;
    for point in report.points.iter().filter(|point| !point.is_balanced()) {
        let Point { concurrency, finished, prefills, sustained_tokens_per_second: sustained, .. } = point;
        writeln!(
            out,
            "concurrency {concurrency}: {finished} finished and {prefills} were read, which sustains {sustained:.0} tokens/s; a \
             longer --seconds shows the balance"
        )?;
    }
    Ok(())
}

/// One real request: everything is compiled, planned and captured before the clock runs.
fn warm_up(args: &ServeArgs, bench: &Bench, executor: &mut CudaExecutor) -> CliResult {
    expect_admitted(executor.admit(sequence(u64::MAX, args.input, 3, bench.spec.vocab))?)?;
    let mut token = read_prompt(executor, RequestId(u64::MAX))?;
    for _ in 0..2 {
        let row = DecodeRow { request: RequestId(u64::MAX), token };
        token = executor.decode(&[row])?.remove(0).map_err(|error| CliError::Failure(error.to_string()))?;
    }
    executor.release(RequestId(u64::MAX));
    Ok(())
}

/// A request that decodes.
struct Running {
    row: DecodeRow,
    left: usize,
    last: Instant,
}

struct Loop<'a> {
    args: &'a ServeArgs,
    executor: &'a mut CudaExecutor,
    concurrency: usize,
    next: u64,
    running: Vec<Running>,
    prefilling: Option<(RequestId, Instant)>,
}

impl<'a> Loop<'a> {
    fn new(args: &'a ServeArgs, executor: &'a mut CudaExecutor, concurrency: usize) -> Self {
        Self { args, executor, concurrency, next: 1, running: Vec::new(), prefilling: None }
    }

    /// Begins in the steady state: requests stand at evenly spread places of their answers.
    fn fill(&mut self) -> CliResult {
        let (input, output, vocab) = (self.args.input, self.args.output, self.executor.info().vocab);
        let running = self.concurrency.min(self.executor.memory_plan().requests);
        for index in 0..running {
            let done = 1 + index * (output - 3).max(1) / running;
            let sequence = sequence(self.next, input + done, output - done, vocab);
            let id = sequence.request;
            if self.executor.admit_in_the_middle(sequence)? != Admission::Admitted {
                break;
            }
            self.next += 1;
            let row = DecodeRow { request: id, token: TokenId(0) };
            // The token that it stands at counts as generated.
            self.running.push(Running { row, left: output - done - 1, last: Instant::now() });
        }
        Ok(())
    }

    fn measure(&mut self, ceilings: &Ceilings) -> CliResult<Point> {
        self.fill()?;
        let mut point = Point { concurrency: self.concurrency, ..Point::default() };
        // Graphs of the batch sizes to come are captured now.
        for _ in 0..8 {
            self.decode(0, &mut Point::default(), &mut Duration::default())?;
        }
        let (bytes, rows, before) = (self.executor.step_bytes(), self.running.len(), self.executor.stats());
        let (mut between, mut first) = (Duration::ZERO, Duration::ZERO);
        let start = Instant::now();
        while start.elapsed().as_secs() < self.args.seconds as u64 {
            crate::interrupt::check()?;
            // As the engine does.
            while self.read(&mut point, &mut first)? && self.executor.begins_alone() {
                self.decode(self.running.len() - 1, &mut point, &mut between)?;
            }
            point.running = point.running.max(self.running.len());
            self.decode(0, &mut point, &mut between)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let decoded = point.output_tokens - point.prefills;
        point.seconds = seconds;
        point.output_tokens_per_second = point.output_tokens as f64 / seconds;
        point.sustained_tokens_per_second = (point.prefills * self.args.output as u64) as f64 / seconds;
        point.per_token_ms = between.as_secs_f64() * 1e3 / decoded.max(1) as f64;
        let steps = self.args.output as f64 / rows.max(1) as f64;
        let link_bytes = (self.executor.stats().link_bytes - before.link_bytes) as f64;
        point.floor.memory_ms = steps * bytes.total() as f64 / ceilings.memory_read * 1e3;
        point.floor.link_ms =
            link_bytes / point.output_tokens.max(1) as f64 * self.args.output as f64 / ceilings.host_to_device * 1e3;
        point.first_token_ms = first.as_secs_f64() * 1e3 / point.prefills.max(1) as f64;
        Ok(point)
    }

    /// Goes on reading a prompt; gives whether that is done.
    fn read(&mut self, point: &mut Point, first: &mut Duration) -> CliResult<bool> {
        self.admit()?;
        let Some((id, admitted)) = self.prefilling else { return Ok(false) };
        let progress = self.executor.prefill(id).map_err(|error| CliError::Failure(error.to_string()))?;
        let PrefillProgress::Done(token) = progress else { return Ok(false) };
        *first += admitted.elapsed();
        point.prefills += 1;
        point.output_tokens += 1;
        self.prefilling = None;
        let row = DecodeRow { request: id, token };
        self.running.push(Running { row, left: self.args.output - 1, last: Instant::now() });
        Ok(true)
    }

    fn admit(&mut self) -> CliResult {
        if self.prefilling.is_some() || self.running.len() >= self.concurrency {
            return Ok(());
        }
        let sequence = sequence(self.next, self.args.input, self.args.output, self.executor.info().vocab);
        let id = sequence.request;
        match self.executor.admit(sequence)? {
            Admission::Admitted => {
                self.next += 1;
                self.prefilling = Some((id, Instant::now()));
                Ok(())
            }
            Admission::Wait { .. } if !self.running.is_empty() => Ok(()),
            Admission::Wait { reason } | Admission::Refused { reason } => Err(CliError::Input(reason)),
        }
    }

    /// Decodes what runs from place `first` on.
    fn decode(&mut self, first: usize, point: &mut Point, between: &mut Duration) -> CliResult {
        if self.running.len() <= first {
            return Ok(());
        }
        let rows: Vec<DecodeRow> = self.running[first..].iter().map(|running| running.row).collect();
        let tokens = self.executor.decode(&rows)?;
        let now = Instant::now();
        for (running, token) in self.running[first..].iter_mut().zip(tokens) {
            running.row.token = token.map_err(|error| CliError::Failure(error.to_string()))?;
            running.left -= 1;
            *between += now - running.last;
            running.last = now;
            point.output_tokens += 1;
        }
        for running in self.running.extract_if(.., |running| running.left == 0) {
            self.executor.release(running.row.request);
            point.finished += 1;
        }
        Ok(())
    }

    /// Ends all requests.
    fn end(&mut self) {
        for running in self.running.drain(..) {
            self.executor.release(running.row.request);
        }
        if let Some((id, _)) = self.prefilling.take() {
            self.executor.release(id);
        }
    }
}
