//! `oasis explain`: the configuration, value by value.

use crate::args::GlobalArgs;
use crate::error::CliResult;
use crate::{settings, text};
use clap::Args;
use oasis_core::config::json_schema;
use std::io::Write;

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Print a complete configuration file
    #[arg(long, conflicts_with = "schema")]
    toml: bool,
    /// Print the JSON schema of configuration files, for editors
    #[arg(long)]
    schema: bool,
}

/// Prints every value with its origin, a complete file, or the schema.
///
/// # Errors
/// When the configuration is wrong.
pub fn run(args: &ExplainArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    if args.schema {
        serde_json::to_writer_pretty(&mut *out, &json_schema())?;
        return Ok(writeln!(out)?);
    }
    let resolved = settings::resolve(global, Vec::new())?;
    if args.toml {
        return Ok(write!(out, "{}", resolved.to_toml())?);
    }
    let rows: Vec<Vec<String>> = (resolved.values.iter())
        .map(|(key, value, origin)| vec![key.clone(), value.to_string(), origin.to_string()])
        .collect();
    for line in text::columns(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}
