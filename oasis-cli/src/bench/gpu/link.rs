//! The ceilings of a device: its memory and its link to the host.

use crate::args::GlobalArgs;
use crate::error::CliResult;
use crate::settings::resolve;
use crate::{assemble, text};
use clap::Args;
use oasis_core::config::Layer;
use oasis_cuda::device::Device;
use oasis_cuda::measure::Ceilings;
use std::io::Write;

/// Arguments of `bench link`.
#[derive(Debug, Args)]
pub struct LinkArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
///
/// # Errors
/// When there is no device, or it fails.
pub fn run(args: &LinkArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let resolved = resolve(global, vec![Layer::assignment("oasis bench", "device.kind=cuda")?])?;
    assemble::check_device(&resolved.config)?;
    let device = Device::open(resolved.config.device.ordinal)?;
    let ceilings = Ceilings::measure(&device)?;
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &ceilings)?;
        return Ok(writeln!(out)?);
    }
    let rows = [
        ("device", device.facts.name.clone()),
        ("memory read", format!("{:.2} TB/s", ceilings.memory_read / 1e12)),
        ("host to device", format!("{:.1} GB/s", ceilings.host_to_device / 1e9)),
        ("device to host", format!("{:.1} GB/s", ceilings.device_to_host / 1e9)),
    ];
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(what, figure)| vec![what.to_owned(), figure]).collect();
    Ok(writeln!(out, "{}", text::columns(&rows).join("\n"))?)
}
