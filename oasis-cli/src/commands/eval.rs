//! `oasis eval`: what a policy does to answers and predictions.

use crate::args::GlobalArgs;
use crate::args::ModelArgs;
use crate::assemble;
use crate::error::{CliError, CliResult};
use crate::eval::agreement::{self, AgreementReport, Window};
use crate::eval::coverage;
use crate::eval::recall::{self, Contender, Recall, Score};
use crate::eval::tasks::{self, Task};
use crate::progress::Progress;
use crate::settings::resolve;
use crate::tokens::ModelText;
use clap::{Args, Subcommand, ValueEnum};
use oasis_core::config::{Budget, ConfigError, Layer, Resolved};
use oasis_core::ids::TokenId;
use oasis_core::pipeline::Tracer;
use oasis_core::policy::Aggregate;
use oasis_models::cpu::{CpuExecutor, Residency};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    measure: Measure,
}

#[derive(Debug, Subcommand)]
enum Measure {
    /// Exact match of greedy answers to retrieval tasks, dense and policy by policy
    Recall(RecallArgs),
    /// Share of the next step's own top-K that the draft query predicts, layer by layer
    Agreement(AgreementArgs),
    /// Share of dense attention's weight that lies on what is resident, policy by policy
    Coverage(CoverageArgs),
}

#[derive(Debug, Args)]
struct RecallArgs {
    /// Length class in tokens; may be repeated [default: all that the tasks have]
    #[arg(long, value_name = "TOKENS")]
    length: Vec<usize>,
    /// Kind of task; may be repeated [default: all]
    #[arg(long, value_name = "TASK")]
    task: Vec<String>,
    /// Prompts a task and length [default: all]
    #[arg(long, value_name = "N")]
    per: Option<usize>,
    /// Tasks, one JSON object a line [default: the embedded ones]
    #[arg(long, value_name = "FILE")]
    tasks: Option<PathBuf>,
    #[command(flatten)]
    contenders: ContenderArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
}

/// Which policies are compared.
#[derive(Debug, Args)]
struct ContenderArgs {
    /// Measure the configuration as it is, without the usual policies
    #[arg(long)]
    configured: bool,
    /// A further policy, such as selector.fetch_ratio=0.1,predictor.kind=last-query; may be repeated
    #[arg(long, value_name = "KEY=VALUE,...")]
    with: Vec<String>,
}

/// Contexts and what follows them.
#[derive(Debug, Args)]
struct WindowArgs {
    /// Text to decode along [default: the embedded tasks and their answers]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Tokens before the first measured step; of the embedded tasks the length class
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Steps of one window of the text
    #[arg(long, value_name = "N", default_value_t = 64, requires = "file")]
    steps: usize,
    /// Windows of the text, or tasks
    #[arg(long, value_name = "N", default_value_t = 8)]
    windows: usize,
}

#[derive(Debug, Args)]
struct CoverageArgs {
    #[command(flatten)]
    windows: WindowArgs,
    #[command(flatten)]
    contenders: ContenderArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
}

#[derive(Debug, Args)]
struct AgreementArgs {
    #[command(flatten)]
    windows: WindowArgs,
    /// Decode along the model's own greedy continuation of each window's context
    #[arg(long, requires = "file")]
    greedy: bool,
    /// How the query heads of a group are joined
    #[arg(long, value_enum, default_value_t = Join::Sum)]
    aggregate: Join,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Join {
    Sum,
    Max,
}

/// Measures and prints.
///
/// # Errors
/// When the input is wrong, a request fails, or Ctrl-C ends the measurement.
pub fn run(args: &EvalArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    crate::interrupt::catch();
    match &args.measure {
        Measure::Recall(args) => run_recall(args, global, out),
        Measure::Agreement(args) => run_agreement(args, global, out),
        Measure::Coverage(args) => run_coverage(args, global, out),
    }
}

fn run_recall(args: &RecallArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let arguments = args.model.layers()?;
    let resolved = resolve(global, arguments.clone())?;
    assemble::check_device(&resolved.config)?;
    let tasks = tasks::read(args.tasks.as_deref())?;
    let lengths = choose("--length", &args.length, tasks.iter().map(|task| task.length))?;
    let kinds = choose("--task", &args.task, tasks.iter().map(|task| task.task.clone()))?;
    let model = assemble::open_model(&resolved.config)?;
    let recall = Recall {
        global,
        arguments: &arguments,
        model: &model,
        weights: assemble::load_model(&resolved.config, &model)?,
        text: ModelText::new(&model.checkpoint)?,
        prefill_chunk: resolved.config.prefill_chunk(),
    };
    let contenders = Contender::choose(args.contenders.configured, &args.contenders.with);

    let mut scores: Vec<Score> = Vec::new();
    for &length in &lengths {
        let of_length: Vec<&Task> = (kinds.iter())
            .flat_map(|kind| {
                let of_kind = tasks.iter().filter(move |task| task.length == length && task.task == *kind);
                of_kind.take(args.per.unwrap_or(usize::MAX))
            })
            .collect();
        let bar = Progress::parts("answering");
        scores.extend(recall.run(&contenders, &of_length, |done| bar.set(done as u64, of_length.len() as u64))?);
    }
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &scores)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", recall::render(&scores, &resolved.config))?;
    }
    Ok(())
}

/// The asked ones among those there are, or all of them.
fn choose<T: Clone + Ord + std::fmt::Display>(
    argument: &str,
    asked: &[T],
    there: impl Iterator<Item = T>,
) -> CliResult<Vec<T>> {
    let there: BTreeSet<T> = there.collect();
    if let Some(missing) = asked.iter().find(|value| !there.contains(value)) {
        let known: Vec<String> = there.iter().map(ToString::to_string).collect();
        return Err(CliError::Input(format!("{argument}: expected one of {}, found {missing}", known.join(", "))));
    }
    Ok(if asked.is_empty() { there.into_iter().collect() } else { asked.to_vec() })
}

fn run_coverage(args: &CoverageArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let arguments = args.model.layers()?;
    let resolved = resolve(global, arguments.clone())?;
    assemble::check_device(&resolved.config)?;
    let budget = budget(&resolved)?;
    let model = assemble::open_model(&resolved.config)?;
    let text = ModelText::new(&model.checkpoint)?;
    let windows = args.windows.read(&text, model.checkpoint.spec().max_positions)?;
    let setting = Recall {
        global,
        arguments: &arguments,
        model: &model,
        weights: assemble::load_model(&resolved.config, &model)?,
        text,
        prefill_chunk: resolved.config.prefill_chunk(),
    };
    let contenders = Contender::choose(args.contenders.configured, &args.contenders.with);
    let bar = Progress::parts("decoding");
    let options = assemble::cpu_options(&resolved.config);
    let coverage = coverage::measure(&setting, &contenders, options, &windows, |done| {
        bar.set(done as u64, windows.len() as u64);
    })?;
    bar.clear();
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &coverage)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", coverage::render(&coverage, &windows, budget))?;
    }
    Ok(())
}

fn run_agreement(args: &AgreementArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    // The measure's own setting: the draft query's choice is what the working set becomes.
    let mut layers = args.model.layers()?;
    for setting in ["predictor.kind=draft-query", "selector.kind=fetch-all"] {
        layers.push(Layer::assignment(setting, setting)?);
    }
    let resolved = resolve(global, layers)?;
    assemble::check_device(&resolved.config)?;
    let budget = budget(&resolved)?;
    let model = assemble::open_model(&resolved.config)?;
    let text = ModelText::new(&model.checkpoint)?;
    let mut windows = args.windows.read(&text, model.checkpoint.spec().max_positions)?;
    let policies = assemble::build_policies(&resolved, &model)?;
    let weights = assemble::load_model(&resolved.config, &model)?;
    let mut executor = assemble::start_executor(&resolved.config, weights.clone(), policies, Tracer::default())?;
    let aggregate = match args.aggregate {
        Join::Sum => Aggregate::Sum,
        Join::Max => Aggregate::Max,
    };
    let chunk = resolved.config.prefill_chunk();
    if args.greedy {
        let options = assemble::cpu_options(&resolved.config);
        let mut dense = CpuExecutor::new(weights.clone(), Residency::Dense, options, Tracer::default())?;
        for window in &mut windows {
            window.continue_greedily(&mut dense, &weights, chunk)?;
        }
    }
    let bar = Progress::parts("decoding");
    let total = windows.len() as u64;
    let report = agreement::measure(&mut executor, &weights, &windows, budget, aggregate, chunk, |done| {
        bar.set(done as u64, total);
    })?;
    bar.clear();
    print_agreement(&report, args.json, out)
}

fn print_agreement(report: &AgreementReport, json: bool, out: &mut dyn Write) -> CliResult {
    if json {
        serde_json::to_writer_pretty(&mut *out, report)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", agreement::render(report))?;
    }
    Ok(())
}

fn budget(resolved: &Resolved) -> CliResult<usize> {
    match resolved.config.kv.budget_blocks {
        Budget::Blocks(blocks) => Ok(blocks),
        Budget::All => {
            let error = ConfigError::new("kv.budget_blocks", "a number of blocks: choices are compared", "all");
            Err(resolved.locate(error).into())
        }
    }
}

impl WindowArgs {
    /// The windows, none longer than `limit` tokens.
    fn read(&self, text: &ModelText<'_>, limit: usize) -> CliResult<Vec<Window>> {
        let windows = match &self.file {
            Some(path) => self.of_text(path, text)?,
            None => self.of_tasks(text)?,
        };
        if let Some(longest) = windows.iter().map(|w| w.context.len() + w.forced.len()).max().filter(|l| *l > limit) {
            return Err(CliError::input(
                format!("the contexts: expected at most {limit} tokens with the steps, found {longest}"),
                "lower --context or --steps",
            ));
        }
        Ok(windows)
    }

    fn of_text(&self, path: &PathBuf, text: &ModelText<'_>) -> CliResult<Vec<Window>> {
        let prose = std::fs::read_to_string(path).map_err(|error| {
            CliError::Input(format!("--file {}: expected readable UTF-8 text, found: {error}", path.display()))
        })?;
        Window::cut(&text.encode(&prose)?, self.context.unwrap_or(4096), self.steps, self.windows)
    }

    /// One window a task: its prompt, then its answer.
    fn of_tasks(&self, text: &ModelText<'_>) -> CliResult<Vec<Window>> {
        let tasks = tasks::read(None)?;
        let asked: Vec<usize> = self.context.into_iter().collect();
        let length = *choose("--context", &asked, tasks.iter().map(|t| t.length))?.last().expect("there are tasks");
        // In turn over the kinds of task, as the file has several of each kind in a row.
        let mut of_length: Vec<&Task> = tasks.iter().filter(|task| task.length == length).collect();
        of_length.sort_by_key(|task| task.id.rsplit('-').next().and_then(|n| n.parse::<usize>().ok()));
        let end: Vec<TokenId> = text.stop_tokens().into_iter().take(1).collect();
        of_length
            .into_iter()
            .take(self.windows)
            .map(|task| {
                let context = text.encode_chat(None, task.question())?;
                let forced = text.encode(&task.answer)?.into_iter().chain(end.iter().copied()).collect();
                Ok(Window { context, forced })
            })
            .collect()
    }
}
