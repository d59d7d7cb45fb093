//! `oasis run`: answers one prompt and says what it cost.

use crate::args::GlobalArgs;
use crate::args::ModelArgs;
use crate::assemble::{self, Model};
use crate::commands::demo;
use crate::error::{CliError, CliResult};
use crate::eval::meter::{AgreementMeter, Chooser, Source, Totals};
use crate::generate::{Finish, Generation, generate};
use crate::nodes::{self, NodeArgs};
use crate::output::NewFile;
use crate::prompt::PromptArgs;
use crate::report::{Agreement, RunReport};
use crate::settings::resolve;
use crate::tokens::ModelText;
use clap::Args;
use oasis_core::config::{DeviceKind, Layer, Resolved};
use oasis_core::engine::{Engine, GenerateRequest};
use oasis_core::executor::Executor;
use oasis_core::pipeline::Tracer;
use oasis_core::policy::{Aggregate, QuerySource};
use oasis_models::checkpoint;
use oasis_models::cpu::CpuExecutor;
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    prompt: PromptArgs,
    /// Most tokens to generate
    #[arg(short = 'n', long, value_name = "N", default_value = "128")]
    max_tokens: NonZeroUsize,
    /// Go on after the model's end-of-text token
    #[arg(long)]
    ignore_eos: bool,
    /// Write the spans of all stages, for `oasis trace draw`, chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Measure how much of each step's exact choice of blocks was predicted
    #[arg(long)]
    audit: bool,
    /// Let a decode node answer: `oasis serve-node --role decode`. Policies are the node's
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["audit", "trace", "dense"])]
    node: Option<String>,
    #[command(flatten)]
    session: NodeArgs,
    /// Print one JSON document with the text and the report
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    shorthands: Shorthands,
}

/// Options that stand for `--set`.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Shorthands for --set")]
struct Shorthands {
    #[command(flatten)]
    model: ModelArgs,
    /// kv.budget_blocks = "all": keep every block on the device
    #[arg(long)]
    dense: bool,
    /// sampling.temperature: 0 always takes the likeliest token
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// sampling.top_p: the likeliest tokens that make up this probability
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// sampling.top_k: the K likeliest tokens, 0 for all
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// sampling.seed
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
}

impl Shorthands {
    fn are_absent(&self) -> bool {
        self.model.is_absent()
            && !self.dense
            && self.temperature.is_none()
            && self.top_p.is_none()
            && self.top_k.is_none()
            && self.seed.is_none()
    }

    fn layers(&self) -> CliResult<Vec<Layer>> {
        let mut layers = self.model.layers()?;
        if self.dense {
            layers.push(Layer::assignment("--dense", "kv.budget_blocks=all")?);
        }
        let numbers = [
            ("--temperature", "temperature", self.temperature.map(|t| format!("{t:?}"))),
            ("--top-p", "top_p", self.top_p.map(|p| format!("{p:?}"))),
            ("--top-k", "top_k", self.top_k.map(|k| k.to_string())),
            ("--seed", "seed", self.seed.map(|s| s.to_string())),
        ];
        for (argument, key, value) in numbers {
            if let Some(value) = value {
                layers.push(Layer::assignment(&format!("{argument} {value}"), &format!("sampling.{key}={value}"))?);
            }
        }
        Ok(layers)
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    text: &'a str,
    tokens: Vec<u32>,
    finish: Finish,
    report: &'a RunReport,
}

/// Answers the prompt: text on standard output, the report on standard error, or both as JSON.
///
/// # Errors
/// When the input is wrong, the device is lost, or Ctrl-C ends the answer (after the report).
pub fn run(args: &RunArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let trace = args.trace.as_deref().map(|path| NewFile::create("--trace", path)).transpose()?;
    let tracer = if trace.is_some() { Tracer::recording() } else { Tracer::default() };
    let result = match args.prompt.read()? {
        Some(prompt) if args.node.is_some() => ask(args, global, &prompt, out),
        Some(prompt) => answer(args, global, &prompt, &tracer, out),
        None if args.shorthands.are_absent() && !args.json => demo::run(global, &tracer, out),
        None => return Err(PromptArgs::missing()),
    };
    // The steps before a Ctrl-C are worth looking at too.
    if let (Some(file), Ok(()) | Err(CliError::Interrupted)) = (trace, &result) {
        file.write(|file| tracer.write_chrome_trace(file))?;
    }
    result
}

/// Lets a node answer.
fn ask(args: &RunArgs, global: &GlobalArgs, prompt: &str, out: &mut dyn Write) -> CliResult {
    let resolved = resolve(global, args.shorthands.layers()?)?;
    crate::interrupt::catch();
    let checkpoint = checkpoint::open(&resolved.config.model.path)?;
    let text = ModelText::new(&checkpoint)?;
    let request = GenerateRequest {
        prompt: args.prompt.encode(&text, prompt)?,
        max_new_tokens: args.max_tokens.get(),
        stop_tokens: if args.ignore_eos { Vec::new() } else { text.stop_tokens() },
        sampling: resolved.config.sampling,
    };
    let address = args.node.as_deref().unwrap_or_default();
    nodes::ask(address, &args.session, &checkpoint, &text, request, args.json, out)
}

fn answer(args: &RunArgs, global: &GlobalArgs, prompt: &str, tracer: &Tracer, out: &mut dyn Write) -> CliResult {
    let resolved = resolve(global, args.shorthands.layers()?)?;
    let config = &resolved.config;
    assemble::check_device(config)?;
    crate::interrupt::catch();
    let model = assemble::open_model(config)?;
    let text = ModelText::new(&model.checkpoint)?;
    let tokens = args.prompt.encode(&text, prompt)?;
    let (executor, audit) = start(args, &resolved, &model, tracer)?;
    let mut engine = Engine::new(executor, config.engine.max_batch);
    let request = GenerateRequest {
        prompt: tokens,
        max_new_tokens: args.max_tokens.get(),
        stop_tokens: if args.ignore_eos { Vec::new() } else { text.stop_tokens() },
        sampling: config.sampling,
    };

    let generation =
        generate(
            &mut engine,
            &mut text.decoder(),
            request,
            &crate::interrupt::requested,
            &mut |piece| match args.json {
                true => Ok(()),
                false => out.write_all(piece.as_bytes()).and_then(|()| out.flush()),
            },
        )?;
    let report = report(&model, &engine, &generation).with_agreement(audit.and_then(|audit| audit.agreement()));
    if args.json {
        let tokens = generation.tokens.iter().map(|token| token.0).collect();
        let document = Document { text: &generation.text, tokens, finish: generation.finish, report: &report };
        serde_json::to_writer_pretty(&mut *out, &document)?;
        writeln!(out)?;
    } else {
        writeln!(out)?;
        out.flush()?;
        let mut stderr = std::io::stderr().lock();
        writeln!(stderr)?;
        report.write(&mut stderr)?;
    }
    match generation.finish {
        Finish::Interrupted => Err(CliError::Interrupted),
        Finish::Stop | Finish::Length => Ok(()),
    }
}

/// The executor of the configured device.
fn start(
    args: &RunArgs,
    resolved: &Resolved,
    model: &Model,
    tracer: &Tracer,
) -> CliResult<(Box<dyn Executor>, Option<Audit>)> {
    let config = &resolved.config;
    if config.device.kind == DeviceKind::Cuda {
        if args.audit {
            return Err(CliError::input(
                "--audit: expected device.kind = \"cpu\", found \"cuda\"",
                "it measures policies, which are the same on both",
            ));
        }
        let mut executor = assemble::cuda::start_model(resolved, model)?;
        executor.set_tracer(tracer.clone());
        return Ok((Box::new(executor), None));
    }
    let policies = assemble::build_policies(resolved, model)?;
    let weights = assemble::load_model(config, model)?;
    let mut executor = assemble::start_executor(config, weights, policies, tracer.clone())?;
    let audit = if args.audit { Some(Audit::start(&mut executor)?) } else { None };
    Ok((Box::new(executor), audit))
}

/// Compares the predicted with the exact choice of blocks while a request decodes.
struct Audit {
    totals: Arc<Mutex<Totals>>,
    source: Source,
}

impl Audit {
    fn start(executor: &mut CpuExecutor) -> CliResult<Self> {
        let (info, summarizer) = (executor.info().clone(), executor.summarizer());
        let (Some(budget), Some(summarizer)) = (info.budget_blocks, summarizer) else {
            return Err(CliError::Input(
                "--audit: expected sparse decoding, found kv.budget_blocks = \"all\"".to_owned(),
            ));
        };
        let source = match executor.query_source() {
            Some(QuerySource::Draft) => Source::Draft,
            Some(QuerySource::Current) => Source::Previous,
            _ => {
                return Err(CliError::Input(
                    "--audit: expected a predictor that looks ahead, found one that is exact by itself".to_owned(),
                ));
            }
        };
        let geometry = info.geometry;
        let (shape, kv_heads) = (geometry.head_shape(), geometry.kv_heads);
        let chooser = Chooser { summarizer, shape, kv_heads, budget, aggregate: Aggregate::Sum };
        let (meter, totals) = AgreementMeter::new(chooser, geometry.layers);
        executor.set_observer(Some(Box::new(meter)));
        Ok(Self { totals, source })
    }

    /// `None` when the context never outgrew the budget.
    fn agreement(self) -> Option<Agreement> {
        let totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        totals.per_layer(self.source).and_then(Agreement::of_layers)
    }
}

fn report<E: Executor>(model: &Model, engine: &Engine<E>, generation: &Generation) -> RunReport {
    let executor = engine.executor();
    let draft = model.head.as_ref().map(|head| head.provenance().name);
    RunReport::new(model.checkpoint.provenance().name, draft, executor.info(), &executor.stats(), &generation.facts)
}
