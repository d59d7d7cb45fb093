//! `oasis bench`: speed, each figure beside its floor.

use crate::args::{GlobalArgs, ModelArgs, count};
use crate::assemble;
use crate::bench::gpu::{self, decode, kernels, link, prefill, serve, traffic};
use crate::bench::{Longest, cpu, expect_device};
use crate::error::CliResult;
use crate::eval::setting::Contender;
use crate::eval::tasks;
use crate::settings::resolve;
use crate::sweep::{Needs, Work};
use crate::tokens::ModelText;
use clap::{Args, Subcommand};
use oasis_core::config::DeviceKind;
use oasis_core::ids::TokenId;
use std::io::Write;

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    target: Target,
}

#[derive(Debug, Subcommand)]
enum Target {
    /// Prefill and decode steps of the CPU executor: dense, sparse, sparse with its stages paused
    Cpu(CpuArgs),
    /// Decode steps of full batches on a GPU, dense and sparse
    Decode(decode::DecodeArgs),
    /// Time to the first token on a GPU
    Prefill(prefill::PrefillArgs),
    /// A closed loop of requests on a GPU, prefill included
    ServeSim(serve::ServeArgs),
    /// What would cross between a prefill and a decode node, by the selections of a GPU
    Traffic(traffic::TrafficArgs),
    /// What a GPU's memory and link can do at most
    Link(link::LinkArgs),
    /// The kernels of steps and prefills on a GPU, one by one
    Kernels(kernels::KernelsArgs),
}

#[derive(Debug, Args)]
struct CpuArgs {
    /// Prompt tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 8000, value_parser = count(1))]
    context: usize,
    /// Decode steps of each mode
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = count(1))]
    steps: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
}

impl BenchArgs {
    /// What the measurement reads.
    ///
    /// # Errors
    /// Never for the keys that the program itself names.
    pub fn needs(&self) -> CliResult<Needs> {
        match &self.target {
            Target::Cpu(args) => Ok(Needs {
                files: Vec::new(),
                settings: args.model.layers()?,
                work: Work::Model(vec![Contender::configured()]),
            }),
            Target::Decode(args) => args.subject.needs(),
            Target::Prefill(args) => args.subject.needs(),
            Target::ServeSim(args) => args.subject.needs(),
            Target::Traffic(args) => args.subject.needs(),
            Target::Link(_) | Target::Kernels(_) => gpu::needs_device(),
        }
    }
}

/// Measures and prints.
///
/// # Errors
/// When the input is wrong, a request fails, or Ctrl-C ends the measurement.
pub fn run(args: &BenchArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    crate::interrupt::catch();
    let args = match &args.target {
        Target::Cpu(args) => args,
        Target::Decode(args) => return decode::run(args, global, out),
        Target::Prefill(args) => return prefill::run(args, global, out),
        Target::ServeSim(args) => return serve::run(args, global, out),
        Target::Traffic(args) => return traffic::run(args, global, out),
        Target::Link(args) => return link::run(args, global, out),
        Target::Kernels(args) => return kernels::run(args, global, out),
    };
    let resolved = resolve(global, args.model.layers()?)?;
    expect_device(&resolved, DeviceKind::Cpu)?;
    let model = assemble::open_model(&resolved.config)?;
    let longest = Longest {
        argument: "--context",
        prompt: args.context,
        after: cpu::room(args.steps),
        hint: "lower --context or --steps",
    };
    longest.within(model.checkpoint.spec().max_positions, &model.checkpoint.provenance().name)?;
    let prompt = prompt(&ModelText::new(&model.checkpoint)?, args.context)?;
    let bench = cpu::measure(&resolved, &model, &prompt, args.steps)?;
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &bench)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", cpu::render(&bench))?;
    }
    Ok(())
}

/// `context` tokens of the embedded tasks' text.
fn prompt(text: &ModelText<'_>, context: usize) -> CliResult<Vec<TokenId>> {
    let tasks = tasks::read(None)?;
    let mut tokens = Vec::new();
    for task in &tasks {
        if tokens.len() >= context {
            break;
        }
        tokens.extend(text.encode(task.question())?);
    }
    tokens.truncate(context);
    Ok(tokens)
}
