//! What is compared, and on which model.

use crate::args::GlobalArgs;
use crate::assemble::{self, Model};
use crate::error::CliResult;
use crate::settings::resolve;
use crate::tokens::ModelText;
use oasis_core::config::{Layer, Resolved};
use oasis_core::pipeline::Tracer;
use oasis_models::cpu::{CpuExecutor, CpuModel, CpuOptions, Residency};
use std::sync::Arc;

/// A policy under test: a name and the settings that make it.
pub struct Contender {
    name: String,
    settings: Vec<String>,
}

impl Contender {
    /// From `key=value,key=value`.
    pub fn parse(text: &str) -> Self {
        Self { name: text.to_owned(), settings: text.split(',').map(str::to_owned).collect() }
    }

    /// The configuration as it is, or the usual ones; then one for each of `with`.
    pub fn choose(configured: bool, with: &[String]) -> Vec<Self> {
        let alone = || vec![Self { name: "configured".to_owned(), settings: Vec::new() }];
        let mut contenders = if configured { alone() } else { Self::defaults() };
        contenders.extend(with.iter().map(|text| Self::parse(text)));
        contenders
    }

    /// Dense decoding, the upper and the lower bound, and the policies between.
    fn defaults() -> Vec<Self> {
        let rows: [(&str, &[&str]); 5] = [
            ("dense", &["kv.budget_blocks=all"]),
            ("exact + fetch-all", &["predictor.kind=exact", "selector.kind=fetch-all"]),
            ("draft-query + capped-lru", &["predictor.kind=draft-query", "selector.kind=capped-lru"]),
            ("last-query + capped-lru", &["predictor.kind=last-query", "selector.kind=capped-lru"]),
            ("static", &["predictor.kind=last-query", "selector.kind=static"]),
        ];
        let owned = |settings: &[&str]| settings.iter().map(ToString::to_string).collect();
        rows.into_iter().map(|(name, settings)| Self { name: name.to_owned(), settings: owned(settings) }).collect()
    }

    /// What it is called in tables.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its settings.
    ///
    /// # Errors
    /// When one is no assignment.
    pub fn layers(&self) -> CliResult<Vec<Layer>> {
        self.settings.iter().map(|setting| Ok(Layer::assignment(setting, setting)?)).collect()
    }

    /// An executor with its settings over those of `setting`.
    ///
    /// # Errors
    /// When a setting is wrong.
    pub fn executor(&self, setting: &Setting<'_>) -> CliResult<CpuExecutor> {
        let layers = [setting.arguments.to_vec(), self.layers()?].concat();
        let resolved = resolve(setting.global, layers)?;
        let policies = assemble::build_policies(&resolved, setting.model)?;
        assemble::start_executor(&resolved.config, setting.weights.clone(), policies, Tracer::default())
    }
}

/// A model and the settings under every contender's own.
pub struct Setting<'a> {
    /// Options of the command line, under every contender's own settings.
    pub global: &'a GlobalArgs,
    /// Layers of the command's own arguments.
    pub arguments: &'a [Layer],
    /// The opened model.
    pub model: &'a Model,
    /// Its weights.
    pub weights: Arc<CpuModel>,
    /// Its tokenizer and template.
    pub text: ModelText<'a>,
    /// Tokens of one prefill chunk.
    pub prefill_chunk: usize,
    /// Sizes of executors.
    pub options: CpuOptions,
}

impl<'a> Setting<'a> {
    /// Reads the weights of `model`.
    ///
    /// # Errors
    /// When they cannot be read, or the model has no tokenizer.
    pub fn new(
        global: &'a GlobalArgs,
        arguments: &'a [Layer],
        resolved: &Resolved,
        model: &'a Model,
    ) -> CliResult<Self> {
        Ok(Self {
            global,
            arguments,
            model,
            weights: assemble::load_model(&resolved.config, model)?,
            text: ModelText::new(&model.checkpoint)?,
            prefill_chunk: resolved.config.prefill_chunk(),
            options: assemble::cpu_options(&resolved.config),
        })
    }

    /// An executor that keeps every block.
    ///
    /// # Errors
    /// When the machine gives no threads.
    pub fn dense(&self) -> CliResult<CpuExecutor> {
        Ok(CpuExecutor::new(self.weights.clone(), Residency::Dense, self.options, Tracer::default())?)
    }
}
