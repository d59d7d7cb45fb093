//! The ceilings of a device: its memory and its link to the host.

use super::resolve_on_gpu;
use crate::args::GlobalArgs;
use crate::error::CliResult;
use crate::{assemble, text};
use clap::Args;
use oasis_cuda::device::Device;
use oasis_cuda::measure::{Ceilings, EntryRates, gather_options};
use serde::Serialize;
use std::io::Write;

/// Arguments of `bench link`.
#[derive(Debug, Args)]
pub struct LinkArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What was measured, in bytes a second.
#[derive(Serialize)]
struct Link {
    #[serde(flatten)]
    ceilings: Ceilings,
    entries: EntryRates,
}

/// Measures and prints.
///
/// # Errors
/// When there is no device, or it fails.
pub fn run(args: &LinkArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let resolved = resolve_on_gpu(global, Vec::new())?;
    assemble::check_device(&resolved.config)?;
    let device = Device::open(resolved.config.device.ordinal)?;
    // Entries of 8 KiB, as most models have them.
    let head_dim = 128;
    let gather = gather_options(&device, head_dim, None, None)?;
    let entries = EntryRates::measure(&device, head_dim, gather)?;
    let ceilings = Ceilings::measure(&device)?;
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &Link { ceilings, entries })?;
        return Ok(writeln!(out)?);
    }
    let rate = |bytes: f64| format!("{:.1} GB/s", bytes / 1e9);
    let kib = entries.entry_bytes / 1024;
    let rows = [
        ("device".to_owned(), device.facts.name.clone()),
        ("memory read".to_owned(), format!("{:.2} TB/s", ceilings.memory_read / 1e12)),
        ("host to device".to_owned(), rate(ceilings.host_to_device)),
        ("device to host".to_owned(), rate(ceilings.device_to_host)),
        (
            format!("{kib} KiB entries, gather"),
            format!(
                "{}, {} beside memory reads ({} CTAs, {} entries each)",
                rate(entries.gather),
                rate(entries.gather_beside),
                entries.gather_ctas,
                entries.gather_depth
            ),
        ),
        (format!("{kib} KiB entries, one copy each"), rate(entries.copy_engine)),
        (
            format!("{kib} KiB entries, copies in one call"),
            entries.copy_engine_batch.map_or_else(|| "not with this driver".to_owned(), rate),
        ),
    ];
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(what, figure)| vec![what, figure]).collect();
    Ok(writeln!(out, "{}", text::columns(&rows).join("\n"))?)
}
