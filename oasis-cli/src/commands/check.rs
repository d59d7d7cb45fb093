//! `oasis check`: everything that can go wrong before the weights are read.

use crate::args::GlobalArgs;
use crate::assemble::{self, Model, cuda};
use crate::error::CliResult;
use crate::settings;
use crate::text::{columns, grouped, size};
use clap::Args;
use oasis_core::config::{Budget, DeviceKind, Resolved};
use oasis_core::geometry::{KvDtype, KvGeometry};
use oasis_core::memory::KvStore;
use oasis_core::policy::Selector;
use oasis_core::registry::Role;
use std::io::Write;

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {}

/// Resolves the configuration, opens the model and builds every part; prints a line for each. Looks for the device last:
/// the rest can be checked on a machine without one.
///
/// # Errors
/// The first thing that is wrong.
pub fn run(_args: &CheckArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let resolved = settings::resolve(global, Vec::new())?;
    let config = &resolved.config;
    let model = assemble::open_model(config)?;
    model.checkpoint.tokenizer()?;
    let (selector, store) = match config.device.kind {
        DeviceKind::Cpu => {
            let policies = assemble::build_policies(&resolved, &model)?;
            (policies.selector, policies.store)
        }
        DeviceKind::Cuda => {
            cuda::options(&resolved, model.checkpoint.spec(), model.head.is_some())?;
            (assemble::build_selector(&resolved)?, assemble::build_store(&resolved)?)
        }
    };
    assemble::check_device(config)?;

    let mut rows = vec![line("configuration", format!("{} values", resolved.values.len()))];
    describe_model(&model, &mut rows);
    for role in Role::ALL {
        rows.push(line(role.section(), kind(&resolved, role)));
    }
    describe_memory(&resolved, &model, &*selector, &*store, &mut rows);
    for line in columns(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

fn line(what: &str, found: String) -> Vec<String> {
    vec!["OK".to_owned(), what.to_owned(), found]
}

fn kind(resolved: &Resolved, role: Role) -> String {
    let key = format!("{}.kind", role.section());
    let value = resolved.values.iter().find(|(name, ..)| *name == key);
    value.and_then(|(_, value, _)| value.as_str()).unwrap_or_default().to_owned()
}

fn describe_model(model: &Model, rows: &mut Vec<Vec<String>>) {
    let spec = model.checkpoint.spec();
    let provenance = model.checkpoint.provenance();
    rows.push(line("model", format!("{}: {}, {} layers", provenance.name, spec.family, spec.layers)));
    rows.push(line("weights", format!("{}, {}; not read", size(provenance.file_bytes), provenance.dtype)));
    let template = if model.checkpoint.chat_template().is_some() { "with" } else { "no" };
    rows.push(line("tokenizer", format!("{} tokens, {template} chat template", grouped(spec.vocab as u64))));
    let head = model.head.as_ref().map(|head| head.provenance());
    rows.push(line(
        "draft head",
        head.map_or_else(|| "none".to_owned(), |p| format!("{}: {}", p.name, size(p.file_bytes))),
    ));
}

fn describe_memory(
    resolved: &Resolved,
    model: &Model,
    selector: &dyn Selector,
    store: &dyn KvStore,
    rows: &mut Vec<Vec<String>>,
) {
    let config = &resolved.config;
    let spec = model.checkpoint.spec();
    let dtype = match config.device.kind {
        DeviceKind::Cpu => KvDtype::F32,
        DeviceKind::Cuda => KvDtype::Bf16,
    };
    let geometry = KvGeometry { dtype, ..assemble::geometry(config, spec) };
    let context = grouped(spec.max_positions as u64);
    let dense = size(geometry.dense_bytes(spec.max_positions));
    rows.push(line("full context", format!("{context} tokens, {dense} of KV")));
    rows.push(line(
        "budget",
        match config.kv.budget_blocks {
            Budget::All => "all blocks: dense decoding".to_owned(),
            Budget::Blocks(blocks) => format!(
                "{} tokens, {} of KV; at most {} admissions a step and KV head",
                grouped((blocks * geometry.block_tokens) as u64),
                size(assemble::working_set_bytes(&geometry, blocks)),
                selector.cap(blocks).min(blocks),
            ),
        },
    ));
    let capacity = store.usage().capacity;
    let tokens = capacity / geometry.dense_bytes(1).max(1);
    rows.push(line("capacity", format!("{}, {} tokens of KV", size(capacity), grouped(tokens))));
}
