//! `oasis trace record`: what every step of a run wanted.

use crate::args::{GlobalArgs, ModelArgs};
use crate::assemble;
use crate::commands::eval::arguments::WindowArgs;
use crate::error::CliResult;
use crate::eval::device::Device;
use crate::eval::observed::Plan;
use crate::eval::setting::Setting;
use crate::output::NewFile;
use crate::progress::Progress;
use crate::replay;
use crate::settings::resolve;
use crate::text::{grouped, size};
use clap::Args;
use oasis_core::config::{Budget, ConfigError};
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `trace record`.
#[derive(Debug, Args)]
pub struct RecordArgs {
    #[command(flatten)]
    windows: WindowArgs,
    /// Decode along the model's own greedy continuation of each window's context
    #[arg(long)]
    greedy: bool,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
}

/// Decodes and writes the file.
///
/// # Errors
/// When the input is wrong, a request fails, the file cannot be written, or Ctrl-C ends the run.
pub fn run(args: &RecordArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    crate::interrupt::catch();
    let arguments = args.model.layers()?;
    let resolved = resolve(global, arguments.clone())?;
    assemble::check_device(&resolved.config)?;
    if resolved.config.kv.budget_blocks == Budget::All {
        let error = ConfigError::new("kv.budget_blocks", "a number of blocks: selections are recorded", "all");
        return Err(resolved.locate(error).into());
    }
    let model = assemble::open_model(&resolved.config)?;
    let setting = Setting::new(global, &arguments, &resolved, &model)?;
    let file = NewFile::create("--output", &args.output)?;
    let mut windows = args.windows.read(&setting.text, setting.max_context())?;
    let plan = Plan::new(&setting)?;
    let device = Device::load(&setting, &[])?;
    if args.greedy {
        device.continue_greedily(&mut windows)?;
    }
    let mut executor = plan.start(&device, &windows)?;
    let bar = Progress::parts("decoding");
    let progress = &mut |done, total| bar.set(done as u64, total as u64);
    let recording = replay::record(&mut executor, &windows, resolved.to_toml(), progress)?;
    bar.clear();
    let bytes = recording.write(file)?;
    writeln!(
        out,
        "{}: {} selections of {} steps after {} prompts, {}",
        args.output.display(),
        grouped(recording.selections.len() as u64),
        grouped(recording.steps),
        recording.requests.len(),
        size(bytes)
    )?;
    Ok(())
}
