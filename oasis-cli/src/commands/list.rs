//! `oasis list`: the kinds that are linked in.

use crate::error::CliResult;
use crate::text;
use clap::Args;
use oasis_core::registry::{self, PluginInfo, Role};
use serde_json::json;
use std::io::Write;

/// Arguments of `list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the catalogue by role.
///
/// # Errors
/// The writer's.
pub fn run(args: &ListArgs, out: &mut dyn Write) -> CliResult {
    let plugins = registry::plugins();
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &plugins.iter().map(|p| to_json(p)).collect::<Vec<_>>())?;
        return Ok(writeln!(out)?);
    }
    let heading = ["KIND", "CRATE", "DEVICE CODE", "DEFAULTS"].map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(heading).chain(plugins.iter().map(|p| row(p))).collect();
    let lines = text::columns(&rows);
    writeln!(out, "  {}", lines[0])?;
    for role in Role::ALL {
        writeln!(out, "{role}")?;
        let of_role: Vec<_> = plugins.iter().zip(&lines[1..]).filter(|(plugin, _)| plugin.role == role).collect();
        if of_role.is_empty() {
            writeln!(out, "  none is linked in")?;
        }
        for (plugin, line) in of_role {
            writeln!(out, "  {line}\n      {}", plugin.about)?;
        }
    }
    Ok(())
}

fn row(plugin: &PluginInfo) -> Vec<String> {
    vec![
        plugin.kind.to_owned(),
        format!("{} {}", plugin.crate_name, plugin.version),
        if plugin.device_code { "yes" } else { "no" }.to_owned(),
        defaults(plugin),
    ]
}

/// `key = value` pairs in one line.
fn defaults(plugin: &PluginInfo) -> String {
    let table = (plugin.defaults)().unwrap_or_default();
    let pairs: Vec<String> = table.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    pairs.join(", ")
}

fn to_json(plugin: &PluginInfo) -> serde_json::Value {
    json!({
        "role": plugin.role.section(),
        "kind": plugin.kind,
        "about": plugin.about,
        "crate": plugin.crate_name,
        "version": plugin.version,
        "device_code": plugin.device_code,
        "defaults": (plugin.defaults)().unwrap_or_default(),
    })
}
