//! `oasis run` without arguments: the embedded model answers questions about long contexts, dense and sparse side by
//! side.

use crate::args::GlobalArgs;
use crate::assemble::{self, Model};
use crate::error::{CliError, CliResult};
use crate::eval::tasks::{self, Task};
use crate::generate::read_prompt;
use crate::progress::Progress;
use crate::settings::resolve;
use crate::text::{columns, grouped, size};
use crate::tokens::{Decode, ModelText};
use oasis_core::config::{DeviceKind, Layer, Resolved};
use oasis_core::executor::{Admission, DecodeRow, Executor, ExecutorStats, Sequence};
use oasis_core::geometry::KvFootprint;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::pipeline::{Stage, Tracer};
use oasis_core::sampling::SamplingParams;
use oasis_cuda::executor::CudaExecutor;
use oasis_models::cpu::{CpuExecutor, CpuModel, PromptState};
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The questions, one of a kind.
const QUESTIONS: [&str; 4] = ["kv-8192-1", "multi-8192-3", "list-8192-2", "var-8192-1"];

/// Most tokens of an answer.
const ANSWER_TOKENS: usize = 64;

/// How the executors of a device come to know a prompt.
trait Device {
    type Executor: Executor;

    /// Who reads a prompt.
    const READ: &'static str;

    /// Takes the next prompt for both executors.
    fn read(&mut self, prompt: &[TokenId]);

    /// Gives it to one of them, whose first token comes back.
    fn first(&mut self, executor: &mut Self::Executor, request: RequestId) -> CliResult<TokenId>;
}

/// On the CPU one prefill serves both executors: it takes longer than all the rest.
struct Cpu {
    model: Arc<CpuModel>,
    chunk: usize,
    state: Option<PromptState>,
}

impl Device for Cpu {
    type Executor = CpuExecutor;

    const READ: &'static str = "once for both";

    fn read(&mut self, prompt: &[TokenId]) {
        let bar = Progress::parts("reading");
        let progress = &mut |done, total| bar.set(done as u64, total as u64);
        self.state = Some(PromptState::read(&self.model, prompt, self.chunk, progress));
    }

    fn first(&mut self, executor: &mut CpuExecutor, request: RequestId) -> CliResult<TokenId> {
        let state = self.state.as_ref().expect("a prompt was read");
        Ok(executor.resume(state, request, ANSWER_TOKENS, SamplingParams::default())?)
    }
}

/// On a GPU each executor reads for itself.
#[derive(Default)]
struct Cuda {
    prompt: Vec<TokenId>,
}

impl Device for Cuda {
    type Executor = CudaExecutor;

    const READ: &'static str = "by each";

    fn read(&mut self, prompt: &[TokenId]) {
        self.prompt = prompt.to_vec();
    }

    fn first(&mut self, executor: &mut CudaExecutor, request: RequestId) -> CliResult<TokenId> {
        let sampling = SamplingParams::default();
        let sequence = Sequence { request, prompt: self.prompt.clone(), max_new_tokens: ANSWER_TOKENS, sampling };
        match executor.admit(sequence)? {
            Admission::Admitted => {}
            Admission::Wait { reason } | Admission::Refused { reason } => return Err(CliError::Input(reason)),
        }
        read_prompt(executor, request)
    }
}

/// One mode of decoding and what it did.
struct Mode<E> {
    executor: E,
    answers: Vec<String>,
    tokens: usize,
    /// From the first token of each answer on.
    time: Duration,
    /// Device memory of the largest request while it decoded.
    device: KvFootprint,
}

impl<E: Executor> Mode<E> {
    fn new(executor: E) -> Self {
        Self { executor, answers: Vec::new(), tokens: 0, time: Duration::ZERO, device: KvFootprint::default() }
    }

    /// Answers the prompt that the device has read; gives the time to the first token.
    fn answer(&mut self, device: &mut impl Device<Executor = E>, text: &ModelText<'_>) -> CliResult<Duration> {
        let request = RequestId::from(self.answers.len() + 1);
        let mut decoder = text.decoder();
        let stop = text.stop_tokens();
        let mut answer = String::new();
        let start = Instant::now();
        let mut token = device.first(&mut self.executor, request)?;
        let first = start.elapsed();
        let start = Instant::now();
        for _ in 1..ANSWER_TOKENS {
            if stop.contains(&token) {
                break;
            }
            answer.push_str(&decoder.push(token)?);
            token = self.step(request, token)?;
        }
        self.time += start.elapsed();
        answer.push_str(&decoder.finish()?);
        self.answers.push(answer.trim_end().to_owned());
        let device = self.executor.stats().device;
        if device.total() > self.device.total() {
            self.device = device;
        }
        self.executor.release(request);
        Ok(first)
    }

    fn step(&mut self, request: RequestId, token: TokenId) -> CliResult<TokenId> {
        crate::interrupt::check()?;
        self.tokens += 1;
        let next = self.executor.decode(&[DecodeRow { request, token }])?.remove(0);
        next.map_err(|error| CliError::Failure(error.to_string()))
    }

    fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Answers the questions twice and prints answers and costs.
///
/// # Errors
/// When the configuration is wrong, a request fails, or Ctrl-C ends it.
pub fn run(global: &GlobalArgs, tracer: &Tracer, out: &mut dyn Write) -> CliResult {
    let resolved = resolve(global, Vec::new())?;
    let config = &resolved.config;
    let all = resolve(global, vec![Layer::assignment("the dense side", "kv.budget_blocks=all")?])?;
    assemble::check_device(config)?;
    crate::interrupt::catch();
    let model = assemble::open_model(config)?;
    match config.device.kind {
        DeviceKind::Cpu => {
            let policies = [assemble::build_policies(&all, &model)?, assemble::build_policies(&resolved, &model)?];
            let weights = assemble::load_model(config, &model)?;
            let [dense, sparse] = policies;
            let dense = assemble::start_executor(&all.config, weights.clone(), dense, Tracer::default())?;
            let sparse = assemble::start_executor(config, weights.clone(), sparse, tracer.clone())?;
            let cpu = Cpu { model: weights, chunk: config.prefill_chunk(), state: None };
            compare(&resolved, &model, cpu, Mode::new(dense), Mode::new(sparse), out)
        }
        DeviceKind::Cuda => {
            let dense = assemble::cuda::start_model(&all, &model)?;
            let mut sparse = assemble::cuda::start_model(&resolved, &model)?;
            sparse.set_tracer(tracer.clone());
            compare(&resolved, &model, Cuda::default(), Mode::new(dense), Mode::new(sparse), out)
        }
    }
}

fn compare<D: Device>(
    resolved: &Resolved,
    model: &Model,
    mut device: D,
    mut dense: Mode<D::Executor>,
    mut sparse: Mode<D::Executor>,
    out: &mut dyn Write,
) -> CliResult {
    let (kv, text) = (&resolved.config.kv, ModelText::new(&model.checkpoint)?);
    let tasks = tasks::read(None)?;
    let questions: Vec<&Task> = QUESTIONS.iter().filter_map(|id| tasks.iter().find(|task| task.id == *id)).collect();
    writeln!(
        out,
        "{} answers questions about texts of about 8,000 tokens, twice:",
        model.checkpoint.provenance().name
    )?;
    writeln!(out, "  dense   all of the KV cache is on the device")?;
    writeln!(
        out,
        "  sparse  {} blocks of {} tokens a KV head are; the rest is in the store\n",
        kv.budget_blocks, kv.block_tokens
    )?;
    let (mut prompt_tokens, mut prefill) = (0, Duration::ZERO);
    for task in &questions {
        let prompt = text.encode_chat(None, task.question())?;
        let start = Instant::now();
        device.read(&prompt);
        prefill += start.elapsed();
        prompt_tokens += prompt.len();
        prefill += dense.answer(&mut device, &text)?;
        sparse.answer(&mut device, &text)?;
        let question = task.question().lines().last().unwrap_or_default();
        writeln!(out, "{question}  ({} tokens before it)", grouped(prompt.len() as u64))?;
        for (name, mode) in [("dense", &dense), ("sparse", &sparse)] {
            let answer = mode.answers.last().map(String::as_str).unwrap_or_default();
            let verdict = if answer == task.answer { "right" } else { "wrong" };
            writeln!(out, "  {name:<6}  {verdict}  {answer}")?;
        }
        writeln!(out)?;
        out.flush()?;
    }
    let same = dense.answers.iter().zip(&sparse.answers).filter(|(a, b)| a == b).count();
    writeln!(out, "{same} of {} answers are the same\n", questions.len())?;
    let rate = prompt_tokens as f64 / prefill.as_secs_f64();
    writeln!(out, "prefill {} tokens, {rate:.0} tokens/s, {}\n", grouped(prompt_tokens as u64), D::READ)?;
    for line in costs(&dense, &sparse) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Both modes side by side.
fn costs<E: Executor>(dense: &Mode<E>, sparse: &Mode<E>) -> Vec<String> {
    let total = dense.device.total().max(1);
    let share = |mode: &Mode<E>| {
        format!("{}, {:.0}%", size(mode.device.total()), mode.device.total() as f64 / total as f64 * 100.0)
    };
    let stats = sparse.executor.stats();
    let mut rows = vec![
        ["", "dense", "sparse"].map(str::to_owned).to_vec(),
        vec!["decode".to_owned(), format!("{:.0} tokens/s", dense.rate()), format!("{:.0} tokens/s", sparse.rate())],
        vec!["device KV".to_owned(), share(dense), share(sparse)],
    ];
    let (all, some) = (dense.device, sparse.device);
    let parts = [
        ("  working set", all.working_set, some.working_set),
        ("  summaries", all.summaries, some.summaries),
        ("  draft head", all.draft, some.draft),
    ];
    rows.extend(parts.map(|(name, all, some)| vec![name.to_owned(), size(all), size(some)]));
    for (name, value) in sparse_costs(sparse.executor.info().cap, &stats) {
        rows.push(vec![name.to_owned(), "-".to_owned(), value]);
    }
    columns(&rows)
}

/// What only sparse decoding has.
fn sparse_costs(cap: usize, stats: &ExecutorStats) -> Vec<(&'static str, String)> {
    let per_step = stats.link_bytes / stats.steps.max(1);
    let cap_use = stats.admitted_entries as f64 / stats.cap_entries.max(1) as f64;
    let mut costs = vec![
        ("over the link", format!("{} a step", size(per_step))),
        ("cap use", format!("{:.0}% of {cap} blocks a KV head and step", cap_use * 100.0)),
    ];
    if let Some(pipeline) = &stats.pipeline {
        let stages: Vec<String> = (Stage::ALL.iter())
            .map(|stage| format!("{} {} us", stage.name(), pipeline.stage(*stage).mean().as_micros()))
            .collect();
        let wait = pipeline.foreground_wait.as_secs_f64() * 1e3 / stats.steps.max(1) as f64;
        costs.push(("a layer's stages", stages.join(", ")));
        costs.push(("waited for them", format!("{wait:.2} ms a step")));
    }
    costs
}
