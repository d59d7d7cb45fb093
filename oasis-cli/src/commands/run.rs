//! `oasis run`: answers one prompt and says what it cost.

use crate::assemble::{self, Model};
use crate::cli::GlobalArgs;
use crate::error::{CliError, CliResult};
use crate::generate::{Finish, Generation, generate};
use crate::prompt::PromptArgs;
use crate::report::RunReport;
use crate::settings::{ModelArgs, resolve};
use crate::tokens::ModelText;
use clap::Args;
use oasis_core::config::Layer;
use oasis_core::engine::{Engine, GenerateRequest};
use oasis_core::pipeline::Tracer;
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

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
    /// Write the spans of all stages for chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
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
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// sampling.top_p: the likeliest tokens that make up this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// sampling.top_k: the K likeliest tokens, 0 for all
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// sampling.seed
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
}

impl Shorthands {
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
    let prompt = args.prompt.read()?;
    let resolved = resolve(global, args.shorthands.layers()?)?;
    let config = &resolved.config;
    assemble::check_device(config)?;
    let mut trace = args.trace.as_deref().map(create).transpose()?;
    crate::interrupt::catch();
    let model = assemble::open_model(config)?;
    let text = ModelText::new(&model.checkpoint)?;
    let tokens = args.prompt.encode(&text, &prompt)?;
    let tracer = if trace.is_some() { Tracer::recording() } else { Tracer::default() };
    let policies = assemble::build_policies(&resolved, &model)?;
    let weights = assemble::load_model(config, &model)?;
    let executor = assemble::start_executor(config, weights, policies, tracer.clone())?;
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
    let report = report(&model, &engine, &generation);
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
    if let Some(file) = &mut trace {
        tracer.write_chrome_trace(file)?;
        file.flush()?;
    }
    match generation.finish {
        Finish::Interrupted => Err(CliError::Interrupted),
        Finish::Stop | Finish::Length => Ok(()),
    }
}

fn create(path: &Path) -> CliResult<BufWriter<File>> {
    let file = File::create(path).map_err(|error| {
        CliError::Input(format!("--trace {}: expected a file that can be written, found: {error}", path.display()))
    })?;
    Ok(BufWriter::new(file))
}

fn report<E: oasis_core::executor::Executor>(model: &Model, engine: &Engine<E>, generation: &Generation) -> RunReport {
    let executor = engine.executor();
    let draft = model.head.as_ref().map(|head| head.provenance().name);
    RunReport::new(model.checkpoint.provenance().name, draft, executor.info(), &executor.stats(), &generation.facts)
}
