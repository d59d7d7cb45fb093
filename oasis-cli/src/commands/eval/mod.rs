//! `oasis eval`: what a policy does to answers and predictions.

pub mod arguments;
mod tasks;

use crate::args::{GlobalArgs, ModelArgs, count};
use crate::assemble;
use crate::error::CliResult;
use crate::eval::device::Device;
use crate::eval::observed::Plan;
use crate::eval::setting::{Contender, Setting};
use crate::eval::tasks::{Task, read};
use crate::eval::window::{Window, longest};
use crate::eval::{agreement, coverage, divergence, perplexity, recall, turnover};
use crate::progress::Progress;
use crate::settings::resolve;
use crate::sweep::{Needs, Work};
use arguments::{ContenderArgs, WindowArgs, choose};
use clap::{Args, Subcommand, ValueEnum};
use oasis_core::config::{Budget, ConfigError, Layer, Resolved};
use oasis_core::policy::Aggregate;
use serde::Serialize;
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
    /// Right greedy answers to retrieval tasks, dense and policy by policy
    Recall(RecallArgs),
    /// Write retrieval tasks of any length for `eval recall`
    Tasks(tasks::TasksArgs),
    /// Perplexity of a text, policy by policy, as a multiple of dense decoding's
    Perplexity(PolicyArgs),
    /// First token at which greedy answers leave dense decoding's, and distance of the logits
    Divergence(PolicyArgs),
    /// Share of the next step's own top-K that the draft query predicts, layer by layer
    Agreement(AgreementArgs),
    /// Share of the top-K that is new from one step to the next, layer by layer
    Turnover(ChoiceArgs),
    /// Share of dense attention's weight on what is resident, policy by policy
    Coverage(PolicyArgs),
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
    #[arg(long, value_name = "N", value_parser = count(1))]
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

/// What measures policies along a text takes.
#[derive(Debug, Args)]
struct PolicyArgs {
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
    choices: ChoiceArgs,
    /// Decode along the model's own greedy continuation of each window's context
    #[arg(long, requires = "file")]
    greedy: bool,
}

/// What measures a model's choices of blocks along a text takes.
#[derive(Debug, Args)]
struct ChoiceArgs {
    #[command(flatten)]
    windows: WindowArgs,
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

impl From<Join> for Aggregate {
    fn from(join: Join) -> Self {
        match join {
            Join::Sum => Self::Sum,
            Join::Max => Self::Max,
        }
    }
}

/// Measures and prints.
///
/// # Errors
/// When the input is wrong, a request fails, or Ctrl-C ends the measurement.
pub fn run(args: &EvalArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    crate::interrupt::catch();
    match &args.measure {
        Measure::Recall(args) => run_recall(args, global, out),
        Measure::Tasks(args) => tasks::run(args, global, out),
        Measure::Perplexity(args) => args.run(global, out, |policies| {
            let Policies { setting, contenders, windows, budget } = policies;
            let device = Device::load(setting, contenders)?;
            let rows = perplexity::measure(&device, contenders, windows, &mut bar("predicting"))?;
            Ok((perplexity::render(&rows, windows, budget), rows))
        }),
        Measure::Divergence(args) => args.run(global, out, |policies| {
            let Policies { setting, contenders, windows, budget } = policies;
            let device = Device::load(setting, contenders)?;
            let rows = divergence::measure(&device, contenders, windows, &mut bar("answering"))?;
            Ok((divergence::render(&rows, windows, budget), rows))
        }),
        Measure::Agreement(args) => run_agreement(args, global, out),
        Measure::Turnover(args) => run_turnover(args, global, out),
        Measure::Coverage(args) => args.run(global, out, |policies| {
            let Policies { setting, contenders, windows, budget } = policies;
            let device = coverage::load(setting, contenders)?;
            let rows = coverage::measure(&device, contenders, windows, &mut bar("decoding"))?;
            Ok((coverage::render(&rows, windows, budget), rows))
        }),
    }
}

impl EvalArgs {
    /// What the measurement reads; `None` of a command that measures nothing.
    ///
    /// # Errors
    /// Never for the keys that the program itself names.
    pub fn needs(&self) -> CliResult<Option<Needs>> {
        let (file, settings, policies) = match &self.measure {
            Measure::Tasks(_) => return Ok(None),
            Measure::Recall(args) => {
                let tasks = args.tasks.clone().map(|file| ("--tasks", file));
                (tasks, args.model.layers()?, args.contenders.contenders())
            }
            Measure::Perplexity(args) | Measure::Divergence(args) | Measure::Coverage(args) => {
                (args.windows.file(), args.model.layers()?, args.contenders.contenders())
            }
            Measure::Agreement(args) => (args.choices.windows.file(), args.layers()?, vec![Contender::configured()]),
            Measure::Turnover(args) => (args.windows.file(), args.model.layers()?, vec![Contender::configured()]),
        };
        Ok(Some(Needs { files: file.into_iter().collect(), settings, work: Work::Model(policies) }))
    }
}

impl AgreementArgs {
    /// Settings of the arguments, and the measure's own: the draft query's choice is what the working set becomes.
    fn layers(&self) -> CliResult<Vec<Layer>> {
        let mut layers = self.choices.model.layers()?;
        for setting in ["predictor.kind=draft-query", "selector.kind=fetch-all"] {
            layers.push(Layer::assignment(setting, setting)?);
        }
        Ok(layers)
    }
}

fn run_recall(args: &RecallArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let arguments = args.model.layers()?;
    let resolved = resolve(global, arguments.clone())?;
    assemble::check_device(&resolved.config)?;
    let tasks = read(args.tasks.as_deref())?;
    let lengths = tasks.iter().map(|task| task.length);
    let lengths = choose("--length", &args.length, lengths, "without --length there are prompts of all of them")?;
    let kinds = tasks.iter().map(|task| task.task.clone());
    let kinds = choose("--task", &args.task, kinds, "without --task there are prompts of all of them")?;
    let pairs = lengths.iter().flat_map(|length| kinds.iter().map(move |kind| (*length, kind)));
    let chosen: Vec<&Task> = pairs
        .flat_map(|(length, kind)| {
            let of_kind = tasks.iter().filter(move |task| task.length == length && task.task == *kind);
            of_kind.take(args.per.unwrap_or(usize::MAX))
        })
        .collect();
    let model = assemble::open_model(&resolved.config)?;
    let setting = Setting::new(global, &arguments, &resolved, &model)?;
    let contenders = args.contenders.contenders();
    let device = Device::load(&setting, &contenders)?;
    let scores = recall::measure(&device, &contenders, &chosen, &mut bar("answering"))?;
    print(&scores, || recall::render(&scores, &chosen, &resolved.config), args.json, out)
}

/// A bar that moves with a measurement and is gone after it.
fn bar(doing: &str) -> impl FnMut(usize, usize) + use<> {
    let bar = Progress::parts(doing);
    move |done, total| bar.set(done as u64, total as u64)
}

/// What policies are measured on.
struct Policies<'a> {
    setting: &'a Setting<'a>,
    contenders: &'a [Contender],
    windows: &'a [Window],
    /// K, in words.
    budget: &'a str,
}

impl PolicyArgs {
    /// Measures and prints the table or its rows.
    fn run<T: Serialize>(
        &self,
        global: &GlobalArgs,
        out: &mut dyn Write,
        measure: impl FnOnce(Policies<'_>) -> CliResult<(String, T)>,
    ) -> CliResult {
        let arguments = self.model.layers()?;
        let resolved = resolve(global, arguments.clone())?;
        assemble::check_device(&resolved.config)?;
        let model = assemble::open_model(&resolved.config)?;
        let setting = Setting::new(global, &arguments, &resolved, &model)?;
        let windows = self.windows.read(&setting.text, setting.max_context())?;
        let (table, rows) = measure(Policies {
            setting: &setting,
            contenders: &self.contenders.contenders(),
            windows: &windows,
            budget: &resolved.config.kv.budget_blocks.to_string(),
        })?;
        print(&rows, || table, self.json, out)
    }
}

fn run_agreement(args: &AgreementArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let layers = args.layers()?;
    let AgreementArgs { choices: args, greedy } = args;
    let resolved = resolve(global, layers.clone())?;
    assemble::check_device(&resolved.config)?;
    let budget = budget(&resolved)?;
    let model = assemble::open_model(&resolved.config)?;
    let setting = Setting::new(global, &layers, &resolved, &model)?;
    let mut windows = args.windows.read(&setting.text, setting.max_context())?;
    check_choice(&resolved, budget, &windows)?;
    let plan = Plan::new(&setting)?;
    let device = Device::load(&setting, &[])?;
    if *greedy {
        device.continue_greedily(&mut windows)?;
    }
    let mut executor = plan.start(&device, &windows)?;
    let join = args.aggregate.into();
    let report = agreement::measure(&mut executor, &windows, budget, join, &mut bar("decoding"))?;
    print(&report, || agreement::render(&report), args.json, out)
}

fn run_turnover(args: &ChoiceArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let arguments = args.model.layers()?;
    let resolved = resolve(global, arguments.clone())?;
    assemble::check_device(&resolved.config)?;
    let budget = budget(&resolved)?;
    let model = assemble::open_model(&resolved.config)?;
    let setting = Setting::new(global, &arguments, &resolved, &model)?;
    let windows = args.windows.read(&setting.text, setting.max_context())?;
    check_choice(&resolved, budget, &windows)?;
    let plan = Plan::new(&setting)?;
    let device = Device::load(&setting, &[])?;
    let mut executor = plan.start(&device, &windows)?;
    let join = args.aggregate.into();
    let report = turnover::measure(&mut executor, &windows, budget, join, &mut bar("decoding"))?;
    print(&report, || turnover::render(&report), args.json, out)
}

/// Prints the results as JSON, or their table.
fn print(results: &impl Serialize, table: impl FnOnce() -> String, json: bool, out: &mut dyn Write) -> CliResult {
    if json {
        serde_json::to_writer_pretty(&mut *out, results)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", table())?;
    }
    Ok(())
}

/// Refuses contexts that fit the budget: two steps in a row must choose, or there is nothing to compare.
fn check_choice(resolved: &Resolved, budget: usize, windows: &[Window]) -> CliResult {
    let blocks = longest(windows).saturating_sub(2) / resolved.config.kv.block_tokens;
    if blocks > budget {
        return Ok(());
    }
    let expected = format!("fewer than the {blocks} blocks of the longest context: choices are compared");
    let error = ConfigError::new("kv.budget_blocks", expected, budget).hint("lower it, or choose longer contexts");
    Err(resolved.locate(error).into())
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
