//! `oasis eval tasks`: writes retrieval tasks.

use super::bar;
use crate::args::{GlobalArgs, TargetArgs, count};
use crate::assemble;
use crate::error::CliResult;
use crate::eval::tasks::generate::{Generator, prose_of};
use crate::eval::tasks::kinds::Kind;
use crate::eval::tasks::prose::Prose;
use crate::eval::tasks::read;
use crate::output::NewFile;
use crate::settings::resolve;
use crate::tokens::ModelText;
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `eval tasks`.
#[derive(Debug, Args)]
pub struct TasksArgs {
    /// Kinds of question, separated by commas [default: all]
    #[arg(long, value_name = "KIND,...", value_delimiter = ',')]
    kind: Vec<Kind>,
    /// Tokens of a context with its answer, of the model's tokenizer; several separated by commas
    #[arg(long, value_name = "TOKENS,...", value_delimiter = ',', default_value = "4096", value_parser = count(1))]
    length: Vec<usize>,
    /// Prompts a kind and length
    #[arg(long, value_name = "N", default_value = "4", value_parser = count(1))]
    per: usize,
    /// Same seed, same tasks
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Text that the facts are hidden in [default: the prose of the embedded tasks]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// For models that were not trained on this wording: ask for what the text says, and let any answer count that
    /// contains the values
    #[arg(long)]
    contains: bool,
    /// File to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    model: TargetArgs,
}

/// Writes.
///
/// # Errors
/// When the text cannot be read, the facts are longer than the context, the model has no chat template, or the file cannot
/// be written.
pub fn run(args: &TasksArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let resolved = resolve(global, args.model.layers()?)?;
    let model = assemble::open_model(&resolved.config)?;
    let text = ModelText::new(&model.checkpoint)?;
    let prose = match &args.text {
        Some(path) => Prose::read(path)?,
        None => prose_of(&read(None)?).expect("the embedded tasks have prose"),
    };
    let generator = Generator { text: &text, prose: &prose, seed: args.seed, contains: args.contains };
    let kinds = if args.kind.is_empty() { Kind::value_variants() } else { &args.kind };
    let total = args.length.len() * kinds.len() * args.per;
    let output = args.output.as_deref().map(|path| NewFile::create("--output", path)).transpose()?;
    let (mut lines, mut bar) = (Vec::new(), bar("writing"));
    for (length, kind) in args.length.iter().flat_map(|length| kinds.iter().map(move |kind| (*length, *kind))) {
        for number in 0..args.per {
            crate::interrupt::check()?;
            lines.push(serde_json::to_string(&generator.task(kind, length, number)?)?);
            bar(lines.len(), total);
        }
    }
    let lines: String = lines.into_iter().map(|line| line + "\n").collect();
    match output {
        None => Ok(out.write_all(lines.as_bytes())?),
        Some(file) => file.write(|file| file.write_all(lines.as_bytes())).map(drop),
    }
}
