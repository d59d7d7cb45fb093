//! `oasis model`: what measured values say of what was not measured.

use crate::error::{CliError, CliResult};
use crate::output::refused;
use crate::ttft::{Measured, Missed, Ttft, draw, render};
use clap::{Args, Subcommand};
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `model`.
#[derive(Debug, Args)]
pub struct ModelCommandArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Time to the first token of two nodes with a prefix cache: full against partial transfer (the paper's Fig. 15)
    Ttft(TtftArgs),
}

#[derive(Debug, Args)]
struct TtftArgs {
    /// Measured prefill times, union sizes and the cache's shape, TOML or JSON [default: built in, Qwen3-8B on an H200]
    #[arg(long, value_name = "FILE")]
    measured: Option<PathBuf>,
    /// Prompt tokens, comma-separated
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "24576,32768")]
    context: Vec<u64>,
    /// Shares of the prompt that a prefix cache has, 0 to 1, comma-separated
    #[arg(long, value_name = "SHARE", value_delimiter = ',', default_value = "0.1,0.5,0.9")]
    hit: Vec<f64>,
    /// Links between the nodes, 10^9 bits a second, comma-separated
    #[arg(long, value_name = "GBPS", value_delimiter = ',', default_value = "100,400")]
    link: Vec<f64>,
    /// What is read of a prompt of which a part is cached
    #[arg(long, value_enum, default_value = "suffix")]
    missed: Missed,
    /// Draw it over the hit rate as SVG into this file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Computes and prints.
///
/// # Errors
/// When the file or a value is wrong, or the picture cannot be written.
pub fn run(args: &ModelCommandArgs, out: &mut dyn Write) -> CliResult {
    let What::Ttft(args) = &args.what;
    let measured = Measured::read(args.measured.as_deref())?;
    let check = |name: &str, expected: &str, found: Option<String>| match found {
        None => Ok(()),
        Some(found) => Err(CliError::Input(format!("{name}: expected {expected}, found {found}"))),
    };
    let wrong_link = args.link.iter().find(|link| !(link.is_finite() && **link > 0.0));
    let wrong_hit = args.hit.iter().find(|hit| !(0.0..=1.0).contains(*hit));
    let wrong_context = args.context.iter().find(|tokens| !(1..=1 << 32).contains(*tokens));
    check("--link", "a rate above 0", wrong_link.map(f64::to_string))?;
    check("--hit", "a share of 0 to 1", wrong_hit.map(f64::to_string))?;
    check("--context", "a number of tokens from 1 to 2^32", wrong_context.map(u64::to_string))?;
    let points = |hits: &[f64]| -> Vec<Ttft> {
        let places = args.context.iter().flat_map(|context| args.link.iter().map(move |link| (*context, *link)));
        places
            .flat_map(|(context, link)| hits.iter().map(move |hit| (context, link, *hit)))
            .map(|(context, link, hit)| measured.at(context, hit, link, args.missed))
            .collect()
    };
    let table = points(&args.hit);
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &table)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", render(&measured, &table))?;
    }
    let Some(path) = &args.plot else { return Ok(()) };
    let shares: Vec<f64> = (0..20).map(|step| f64::from(step) / 20.0).collect();
    let picture = draw(&measured, &points(&shares)).unwrap_or_default();
    std::fs::write(path, picture).map_err(|error| refused("--plot", path, &error))
}
