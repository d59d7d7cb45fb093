//! `oasis run` without arguments: the embedded model answers questions about long contexts, dense and sparse side by
//! side.

use crate::args::GlobalArgs;
use crate::assemble;
use crate::error::{CliError, CliResult};
use crate::eval::tasks::{self, Task};
use crate::progress::Progress;
use crate::settings::resolve;
use crate::text::{columns, grouped, size};
use crate::tokens::{Decode, ModelText};
use oasis_core::config::Layer;
use oasis_core::executor::{DecodeRow, Executor, ExecutorStats};
use oasis_core::geometry::KvFootprint;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::pipeline::{Stage, Tracer};
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::{CpuExecutor, PromptState};
use std::io::Write;
use std::time::{Duration, Instant};

/// The questions, one of a kind.
const QUESTIONS: [&str; 4] = ["kv-8192-1", "multi-8192-3", "list-8192-2", "var-8192-1"];

/// Most tokens of an answer.
const ANSWER_TOKENS: usize = 64;

/// One mode of decoding and what it did.
struct Mode {
    executor: CpuExecutor,
    answers: Vec<String>,
    tokens: usize,
    time: Duration,
    /// Device memory of the largest request while it decoded.
    device: KvFootprint,
}

impl Mode {
    fn new(executor: CpuExecutor) -> Self {
        Self { executor, answers: Vec::new(), tokens: 0, time: Duration::ZERO, device: KvFootprint::default() }
    }

    fn answer(&mut self, state: &PromptState, text: &ModelText<'_>) -> CliResult {
        let request = RequestId::from(self.answers.len() + 1);
        let mut decoder = text.decoder();
        let stop = text.stop_tokens();
        let mut answer = String::new();
        let mut token = self.executor.resume(state, request, ANSWER_TOKENS, SamplingParams::default())?;
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
        Ok(())
    }

    fn step(&mut self, request: RequestId, token: TokenId) -> CliResult<TokenId> {
        if crate::interrupt::requested() {
            return Err(CliError::Interrupted);
        }
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
    let text = ModelText::new(&model.checkpoint)?;
    let policies = [assemble::build_policies(&all, &model)?, assemble::build_policies(&resolved, &model)?];
    let weights = assemble::load_model(config, &model)?;
    let [dense, sparse] = policies;
    let mut dense = Mode::new(assemble::start_executor(&all.config, weights.clone(), dense, Tracer::default())?);
    let mut sparse = Mode::new(assemble::start_executor(config, weights.clone(), sparse, tracer.clone())?);

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
        config.kv.budget_blocks, config.kv.block_tokens
    )?;
    let (mut prompt_tokens, mut prefill) = (0, Duration::ZERO);
    for task in &questions {
        let prompt = text.encode_chat(None, task.question())?;
        let start = Instant::now();
        let state = {
            let bar = Progress::parts("reading");
            PromptState::read(&weights, &prompt, config.prefill_chunk(), &mut |done, total| {
                bar.set(done as u64, total as u64)
            })
        };
        prefill += start.elapsed();
        prompt_tokens += prompt.len();
        dense.answer(&state, &text)?;
        sparse.answer(&state, &text)?;
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
    writeln!(out, "prefill {} tokens, {rate:.0} tokens/s, once for both\n", grouped(prompt_tokens as u64))?;
    for line in costs(&dense, &sparse) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Both modes side by side.
fn costs(dense: &Mode, sparse: &Mode) -> Vec<String> {
    let total = dense.device.total().max(1);
    let share = |mode: &Mode| {
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
    let stages: Vec<String> = (Stage::ALL.iter())
        .map(|stage| format!("{} {} us", stage.name(), stats.pipeline.stage(*stage).mean().as_micros()))
        .collect();
    let wait = stats.pipeline.foreground_wait.as_secs_f64() * 1e3 / stats.steps.max(1) as f64;
    vec![
        ("over the link", format!("{} a step", size(per_step))),
        ("cap use", format!("{:.0}% of {cap} blocks a KV head and step", cap_use * 100.0)),
        ("a layer's stages", stages.join(", ")),
        ("waited for them", format!("{wait:.2} ms a step")),
    ]
}
