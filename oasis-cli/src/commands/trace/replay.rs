//! `oasis trace replay`: recorded selections under other policies.

use crate::args::{GlobalArgs, size};
use crate::error::{CliError, CliResult};
use crate::eval::setting::Contender;
use crate::replay::{self, LinkModel, Recording, Replayed};
use crate::settings::resolve_over;
use crate::sweep::{Needs, Work};
use clap::Args;
use oasis_core::config::{Budget, Bytes, ConfigError, Layer, Resolved};
use oasis_core::policy::QuerySource;
use oasis_core::registry::{self, Role};
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `trace replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Selections that `oasis trace record` wrote
    recording: PathBuf,
    /// A further selector or budget, such as selector.kind=lfu,kv.budget_blocks=32; may be repeated
    #[arg(long, value_name = "KEY=VALUE,...")]
    with: Vec<String>,
    /// Every selector that is linked in, with its defaults
    #[arg(long)]
    selectors: bool,
    /// The configuration as it is, without the recorded run's own figures
    #[arg(long)]
    configured: bool,
    /// Imagine a link of so many bytes a second, such as 25GB
    #[arg(long, value_name = "BYTES", value_parser = size)]
    link_bandwidth: Option<Bytes>,
    /// Microseconds before a transfer's first byte
    #[arg(long, value_name = "US", default_value_t = 10.0, value_parser = microseconds, requires = "link_bandwidth")]
    link_latency_us: f64,
    /// Microseconds that the foreground computes in a layer
    #[arg(long, value_name = "US", default_value_t = 500.0, value_parser = microseconds, requires = "link_bandwidth")]
    layer_us: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn microseconds(text: &str) -> Result<f64, String> {
    let time = text.parse().ok().filter(|time: &f64| time.is_finite() && *time >= 0.0);
    time.ok_or_else(|| "expected microseconds of at least 0".to_owned())
}

impl ReplayArgs {
    /// What the replay reads.
    pub fn needs(&self) -> Needs {
        Needs { files: vec![("RECORDING", self.recording.clone())], settings: Vec::new(), work: Work::Recording }
    }
}

/// Replays and prints.
///
/// # Errors
/// When the file is no recording, a setting is wrong or cannot change in a replay, or a selector breaks its obligations.
pub fn run(args: &ReplayArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let recording = Recording::read(&args.recording)?;
    let base = Layer::file(&args.recording.display().to_string(), &recording.config)?;
    let recorded = Resolved::new(std::slice::from_ref(&base))?;
    let predictor = recorded.config.predictor.build().map_err(|error| CliError::Failure(format!("{error:?}")))?;
    let source = predictor.query_source();
    let link = args.link_bandwidth.map(|Bytes(bandwidth)| LinkModel {
        bandwidth: bandwidth as f64,
        latency: args.link_latency_us * 1e-6,
        layer: args.layer_us * 1e-6,
    });
    if link.is_some() && predictor.correction().is_some() {
        return Err(CliError::input(
            "--link-bandwidth: expected a recording of one choice a layer and step, found a predictor that corrects its own",
            "replay it without a link",
        ));
    }
    let mut contenders = Contender::choose(true, &args.with);
    if args.selectors {
        let kinds = registry::plugins().into_iter().filter(|plugin| plugin.role == Role::Selector);
        contenders.extend(kinds.map(|plugin| Contender::parse(&format!("selector.kind={}", plugin.kind))));
    }
    let mut rows = Vec::new();
    if !args.configured {
        let selector = crate::assemble::build_selector(&recorded)?;
        let budget = recording.budget as usize;
        rows.push(Replayed::live(&recording, selector.cap(budget).min(budget)));
    }
    for contender in &contenders {
        let resolved = resolve_over(vec![base.clone()], global, contender.layers()?)?;
        check(&recorded, &resolved)?;
        let mut row = replay_one(&recording, &resolved, source, link)?;
        contender.name().clone_into(&mut row.policy);
        rows.push(row);
    }
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &rows)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", replay::render(&rows))?;
    }
    Ok(())
}

fn replay_one(
    recording: &Recording,
    resolved: &Resolved,
    source: QuerySource,
    link: Option<LinkModel>,
) -> CliResult<Replayed> {
    let recorded = recording.budget as usize;
    let budget = match resolved.config.kv.budget_blocks {
        Budget::Blocks(blocks) if blocks <= recorded => blocks,
        other => {
            let expected = format!("at most the {recorded} blocks that were recorded");
            let error = ConfigError::new("kv.budget_blocks", expected, other).hint("record with a larger budget");
            return Err(resolved.locate(error).into());
        }
    };
    let mut selector = crate::assemble::build_selector(resolved)?;
    replay::replay(recording, &mut *selector, budget, source, link, |_, _, _| ())
}

/// A replay changes the selector and lowers the budget; anything else would have changed what was wanted.
fn check(recorded: &Resolved, resolved: &Resolved) -> CliResult {
    let may_change = |key: &str| key.starts_with("selector.") || key == "kv.budget_blocks";
    for (key, value, _) in resolved.values.iter().filter(|(key, ..)| !may_change(key)) {
        let before = recorded.values.iter().find(|(other, ..)| other == key).map(|(_, value, _)| value);
        if before != Some(value) {
            let expected = before.map_or_else(|| "what was recorded, which has none".to_owned(), ToString::to_string);
            let error = ConfigError::new(key, format!("{expected}, as it was recorded"), value)
                .hint("a replay changes selector.* and lowers kv.budget_blocks");
            return Err(resolved.locate(error).into());
        }
    }
    Ok(())
}
