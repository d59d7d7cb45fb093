//! What is compared, and under which settings.

use crate::args::GlobalArgs;
use crate::assemble::{self, Model};
use crate::error::CliResult;
use crate::settings::resolve;
use crate::tokens::ModelText;
use oasis_core::config::{ConfigError, DeviceKind, Layer, Resolved};
use oasis_cuda::executor::CudaOptions;

/// A policy under test: a name and the settings that make it.
pub struct Contender {
    name: String,
    /// In front of a setting in messages.
    argument: &'static str,
    settings: Vec<String>,
}

impl Contender {
    /// From `key=value,key=value`, as `--with` takes them.
    pub fn parse(text: &str) -> Self {
        Self { name: text.to_owned(), argument: "--with ", settings: text.split(',').map(str::to_owned).collect() }
    }

    fn of_ours(name: &str, settings: &[&str]) -> Self {
        Self { name: name.to_owned(), argument: "", settings: settings.iter().map(ToString::to_string).collect() }
    }

    /// The configuration as it is, or the usual ones; then one for each of `with`.
    pub fn choose(configured: bool, with: &[String]) -> Vec<Self> {
        let mut contenders = if configured { vec![Self::configured()] } else { Self::defaults() };
        contenders.extend(with.iter().map(|text| Self::parse(text)));
        contenders
    }

    /// The configuration as it is.
    pub fn configured() -> Self {
        Self::of_ours("configured", &[])
    }

    /// Dense decoding.
    pub fn dense() -> Self {
        Self::of_ours("dense", &["kv.budget_blocks=all"])
    }

    /// Dense decoding, the upper and the lower bound, and the policies between.
    fn defaults() -> Vec<Self> {
        let rows: [(&str, [&str; 2]); 4] = [
            ("exact + fetch-all", ["predictor.kind=exact", "selector.kind=fetch-all"]),
            ("draft-query + capped-lru", ["predictor.kind=draft-query", "selector.kind=capped-lru"]),
            ("last-query + capped-lru", ["predictor.kind=last-query", "selector.kind=capped-lru"]),
            ("static", ["predictor.kind=last-query", "selector.kind=static"]),
        ];
        let sparse = rows.map(|(name, settings)| Self::of_ours(name, &settings));
        std::iter::once(Self::dense()).chain(sparse).collect()
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
        let layer = |setting: &String| Ok(Layer::assignment(&format!("{}{setting}", self.argument), setting)?);
        self.settings.iter().map(layer).collect()
    }
}

/// A model and the settings under every contender's own.
pub struct Setting<'a> {
    /// Options of the command line, under every contender's own settings.
    global: &'a GlobalArgs,
    /// Layers of the command's own arguments.
    arguments: &'a [Layer],
    /// Both, over the defaults.
    pub resolved: &'a Resolved,
    /// The opened model.
    pub model: &'a Model,
    /// Its tokenizer and template.
    pub text: ModelText<'a>,
}

impl<'a> Setting<'a> {
    /// Reads no weights.
    ///
    /// # Errors
    /// When the model has no tokenizer.
    pub fn new(
        global: &'a GlobalArgs,
        arguments: &'a [Layer],
        resolved: &'a Resolved,
        model: &'a Model,
    ) -> CliResult<Self> {
        Ok(Self { global, arguments, resolved, model, text: ModelText::new(&model.checkpoint)? })
    }

    /// The settings of a contender over these.
    ///
    /// # Errors
    /// When one is wrong, or names another device.
    pub fn of(&self, contender: &Contender) -> CliResult<Resolved> {
        let resolved = resolve(self.global, [self.arguments.to_vec(), contender.layers()?].concat())?;
        let [ours, its] = [self.resolved, &resolved].map(|resolved| resolved.config.device.kind);
        if ours != its {
            let expected = format!("{ours}, on which all run that are compared");
            let error = ConfigError::new("device.kind", expected, its).hint("choose the device with --set device.kind");
            return Err(resolved.locate(error).into());
        }
        Ok(resolved)
    }

    /// The settings of a contender, and what of them a GPU runs.
    ///
    /// # Errors
    /// When one is wrong, or asks for something that a GPU does not run.
    pub fn cuda_options(&self, contender: &Contender) -> CliResult<(Resolved, CudaOptions)> {
        let resolved = self.of(contender)?;
        let options = assemble::cuda::options(&resolved, self.model.checkpoint.spec(), self.model.head.is_some())?;
        Ok((resolved, options))
    }

    /// Longest context in tokens, prompt and answer together.
    pub fn max_context(&self) -> usize {
        let (device, positions) = (&self.resolved.config.device, self.model.checkpoint.spec().max_positions);
        match device.max_context {
            tokens if device.kind == DeviceKind::Cuda && tokens > 0 => tokens.min(positions),
            _ => positions,
        }
    }
}
