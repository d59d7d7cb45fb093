//! The CUDA executor: policies as device code, weights on the device, host memory pinned.

use super::{Loaded, Model, spec_error};
use crate::error::{CliError, CliResult};
use crate::machine;
use crate::progress::Progress;
use crate::text::size;
use oasis_core::config::{Budget, Config, ConfigError, Resolved, StepLaunch};
use oasis_core::geometry::HeadShape;
use oasis_core::memory::{DeviceLink, KvStore};
use oasis_core::policy::QuerySource;
use oasis_core::registry::Role;
use oasis_cuda::device::Device;
use oasis_cuda::executor::{
    Bridge, CudaExecutor, CudaOptions, GatherOptions, HostOptions, HostParts, HostPolicies, Residency, SparseOptions,
    StepMode,
};
use oasis_cuda::kernels::Select;
use oasis_cuda::layout::BLOCK_TOKENS;
use oasis_cuda::model::DeviceModel;
use oasis_models::draft::Eagle3Spec;
use oasis_models::spec::DecoderSpec;
use std::sync::Arc;

/// Most thread blocks of the kernel that reads entries: several a multiprocessor of any device.
const MOST_CTAS: u32 = 1024;

/// What of a configuration the device runs, and how much of it.
///
/// # Errors
/// Names the key that asks for something that a GPU does not run.
pub fn options(resolved: &Resolved, spec: &DecoderSpec, has_head: bool) -> CliResult<CudaOptions> {
    let config = &resolved.config;
    let refuse = |key: &str, expected: &str, found: String, hint: &str| -> CliError {
        resolved.locate(ConfigError::new(key, expected, found).hint(hint)).into()
    };
    if config.kv.block_tokens != BLOCK_TOKENS {
        let found = config.kv.block_tokens.to_string();
        return Err(refuse(
            "kv.block_tokens",
            "16, the block size of the GPU's kernels",
            found,
            "device.kind = \"cpu\" takes any",
        ));
    }
    if ![64, 128].contains(&spec.head_dim) || spec.q_heads / spec.kv_heads > 16 {
        let found = format!("{} and {} query heads a KV head", spec.head_dim, spec.q_heads / spec.kv_heads);
        return Err(refuse(
            "model.path",
            "heads of 64 or 128 elements in groups of at most 16",
            found,
            "device.kind = \"cpu\" runs any",
        ));
    }
    if !spec.vocab.is_multiple_of(8) {
        let found = format!("a vocabulary of {}", spec.vocab);
        let expected = "a vocabulary that is a multiple of 8, as products of a GPU take";
        return Err(refuse("model.path", expected, found, "device.kind = \"cpu\" runs any"));
    }
    let max_context = match config.device.max_context {
        0 => spec.max_positions,
        tokens if tokens > spec.max_positions => {
            let expected = format!("at most the model's {} tokens", spec.max_positions);
            return Err(refuse("device.max_context", &expected, tokens.to_string(), "0 takes the model's"));
        }
        tokens => tokens,
    };
    let residency = match config.kv.budget_blocks {
        Budget::All => Residency::Dense,
        Budget::Blocks(blocks) => {
            let sparse = sparse(resolved, spec, blocks, has_head)?;
            // A context of fewer blocks has so many slots.
            let most = Select::MOST_SLOTS;
            if blocks.min(max_context / BLOCK_TOKENS) > most && sparse.bridge().is_none() {
                let expected = format!("at most {most} blocks, which a GPU chooses among at a time");
                return Err(refuse(
                    "kv.budget_blocks",
                    &expected,
                    blocks.to_string(),
                    "lower it, or device.max_context",
                ));
            }
            Residency::Sparse(Box::new(sparse))
        }
    };
    Ok(CudaOptions {
        residency,
        max_batch: config.engine.max_batch,
        max_context,
        memory_limit: Some(config.device.memory.0).filter(|bytes| *bytes > 0),
        prefill_chunk: config.prefill_chunk(),
        prefill_layers: Some(config.device.prefill_layers).filter(|layers| *layers > 0),
        prefill_multiprocessors: Some(config.device.prefill_multiprocessors).filter(|count| *count > 0),
        mode: match config.device.step {
            StepLaunch::Graph => StepMode::Graph,
            StepLaunch::Streams => StepMode::Streams,
        },
    })
}

fn sparse(resolved: &Resolved, spec: &DecoderSpec, budget: usize, has_head: bool) -> CliResult<SparseOptions> {
    let config = &resolved.config;
    let locate = |role| move |error| CliError::from(resolved.locate(spec_error(role, error)));
    let summarizer = config.summarizer.build(head_shape(spec)).map_err(locate(Role::Summarizer))?;
    let predictor = config.predictor.build().map_err(locate(Role::Predictor))?;
    let selector = config.selector.build().map_err(locate(Role::Selector))?;
    if config.kv.dense_layers > 0 {
        let error = ConfigError::new("kv.dense_layers", "0 on a CUDA device", config.kv.dense_layers)
            .hint("device.kind = \"cpu\" runs dense layers");
        return Err(resolved.locate(error).into());
    }
    let source = predictor.query_source();
    if source == QuerySource::Draft && !has_head {
        let error =
            ConfigError::new("model.draft", "a draft head, as the predictor ranks by a draft token's query", "none")
                .hint("name an EAGLE-3 head of this model, or choose a predictor that needs none: predictor.kind");
        return Err(resolved.locate(error).into());
    }
    let (gather, copy_engine) = match config.transport.device_link() {
        Some(DeviceLink::Gather { ctas, depth }) => {
            let usual = GatherOptions::default();
            let stages = depth.unwrap_or(usual.stages);
            if !(2..=16).contains(&stages) {
                let error = ConfigError::new("transport.depth", "2 to 16 entries in flight, or 0", stages)
                    .hint("0 takes the usual number");
                return Err(resolved.locate(error).into());
            }
            let ctas = ctas.unwrap_or(usual.ctas);
            if ctas > MOST_CTAS {
                let expected = format!("at most {MOST_CTAS} thread blocks, or 0");
                let error = ConfigError::new("transport.ctas", expected, ctas).hint("0 lets the device choose");
                return Err(resolved.locate(error).into());
            }
            (GatherOptions { ctas, stages, stores: stages / 2 }, false)
        }
        Some(DeviceLink::CopyEngine) => (GatherOptions::default(), true),
        None => {
            let error =
                ConfigError::new("transport.kind", "a transport that reaches GPU memory", "one between host memories")
                    .hint("pcie-uva is the usual one");
            return Err(resolved.locate(error).into());
        }
    };
    let capacity = config.store.host_memory();
    let options = SparseOptions {
        budget_blocks: budget,
        cap: selector.cap(budget).min(budget),
        source,
        correction: predictor.correction(),
        ranking: predictor.by_score(),
        summary_bytes: summarizer.device_bytes(head_shape(spec)),
        summarizer: summarizer.device_code(),
        selector: selector.device_code(),
        follows_link: selector.cap_by_link(budget, 1, None).is_some(),
        gather,
        copy_engine,
        host: HostOptions { capacity: capacity.unwrap_or(0), alias: None },
        draft_window: config.kv.draft_window(),
        through_store: capacity.is_none(),
        observed: false,
    };
    if options.needs_device() && options.bridge().is_some() {
        let expected = "a predictor that chooses once, by a query of the same layer, as other policies run on the host";
        let error = ConfigError::new("predictor.kind", expected, "another")
            .hint("choose policies with device code (`oasis list`), or device.kind = \"cpu\"");
        return Err(resolved.locate(error).into());
    }
    if options.through_store && (options.copy_engine || options.bridge().is_some()) {
        let expected = "a store that is host memory, which policies of the host and the copy engine need";
        let error = ConfigError::new("store.kind", expected, "another").hint(
            "dram is one; or choose policies with device code (`oasis list`), a constant cap and transport.kind = \
                 \"pcie-uva\"",
        );
        return Err(resolved.locate(error).into());
    }
    Ok(options)
}

/// What of a configuration the GPU runs while its steps are observed: the host decides in every layer.
///
/// # Errors
/// As [`options`], and for what the host cannot decide.
pub fn observed_options(resolved: &Resolved, spec: &DecoderSpec, has_head: bool) -> CliResult<CudaOptions> {
    let mut options = options(resolved, spec, has_head)?;
    let Residency::Sparse(sparse) = &mut options.residency else { return Ok(options) };
    sparse.observed = true;
    let refuse = |key: &str, expected: &str, hint: &str| -> CliResult<CudaOptions> {
        let expected = format!("{expected}, as the host decides where a GPU shows its steps");
        Err(resolved.locate(ConfigError::new(key, expected, "another").hint(hint)).into())
    };
    if sparse.needs_device() {
        let expected = "a predictor that chooses once, by a query of the same layer";
        return refuse("predictor.kind", expected, "device.kind = \"cpu\" shows any");
    }
    if sparse.through_store {
        return refuse("store.kind", "a store that is host memory", "dram is one");
    }
    Ok(options)
}

/// What of a configuration the GPU of a node runs: KV goes through the node's store, from which the other node reads.
///
/// # Errors
/// As [`options`], and for what cannot be handed over to another node.
pub fn node_options(resolved: &Resolved, spec: &DecoderSpec, has_head: bool) -> CliResult<CudaOptions> {
    let mut options = options(resolved, spec, has_head)?;
    let refuse = |found: &str, hint: &str| {
        let expected = "serve-node: expected sparse decoding that the GPU does by itself, with device.kind = \"cuda\"";
        Err(CliError::input(format!("{expected}, found {found}"), hint))
    };
    let Residency::Sparse(sparse) = &mut options.residency else {
        return refuse("kv.budget_blocks = \"all\"", "set a number of blocks");
    };
    sparse.through_store = true;
    if sparse.bridge().is_some() {
        return refuse(
            "a policy that the host runs",
            "choose policies with device code (`oasis list`) and a constant cap; device.kind = \"cpu\" hands over any",
        );
    }
    if sparse.copy_engine {
        return refuse("the copy engine as transport", "transport.kind = \"pcie-uva\" is the usual one");
    }
    Ok(options)
}

/// Weights for the device.
pub enum Weights<'a> {
    /// Of a checkpoint.
    Loaded(&'a Loaded),
    /// Random ones of a shape, and of a head's.
    Random(&'a DecoderSpec, &'a Eagle3Spec),
}

impl Weights<'_> {
    fn spec(&self) -> &DecoderSpec {
        match self {
            Self::Loaded(loaded) => &loaded.spec,
            Self::Random(spec, _) => spec,
        }
    }
}

/// Refuses to pin more than this machine, or its control group, can give: the kernel would end the process.
fn check_host_memory(bytes: u64) -> CliResult {
    let machine = machine::examine();
    let Some(most) = machine.memory_limit.into_iter().chain(machine.memory).min() else { return Ok(()) };
    if bytes <= most / 10 * 9 {
        return Ok(());
    }
    Err(CliError::input(
        format!(
            "store.capacity: expected at most {} of host memory to pin, found {}",
            size(most / 10 * 9),
            size(bytes)
        ),
        "lower store.capacity, engine.max_batch or device.max_context",
    ))
}

/// Says that policies run on the host, and why.
pub fn bridge_notice(sparse: &SparseOptions, bridge: Bridge) -> String {
    let lacks = [
        (sparse.observed, "steps are observed"),
        (sparse.summarizer.is_none(), "the summarizer has no device code"),
        (sparse.ranking.is_none(), "the predictor does not rank by score"),
        (sparse.selector.is_none(), "the selector has no device code"),
        (sparse.follows_link && sparse.copy_engine, "the selector's cap follows a link that the host drives"),
    ];
    let why: Vec<&str> = lacks.into_iter().filter_map(|(lacks, why)| lacks.then_some(why)).collect();
    let what = match bridge {
        Bridge::Selection => "selection runs",
        Bridge::Prediction => "prediction and selection run",
    };
    format!("{what} on the host, which every layer of a step waits for: this is slow ({})", why.join(", "))
}

/// The policies of a configuration, for the host to run; the configuration has been checked.
///
/// # Errors
/// When a policy cannot be built.
pub fn host_policies(config: &Config, spec: &DecoderSpec) -> CliResult<HostPolicies> {
    let failure = |role| move |error| CliError::from(spec_error(role, error));
    Ok(HostPolicies {
        summarizer: config.summarizer.build(head_shape(spec)).map_err(failure(Role::Summarizer))?,
        predictor: config.predictor.build().map_err(failure(Role::Predictor))?,
        selector: config.selector.build().map_err(failure(Role::Selector))?,
    })
}

fn head_shape(spec: &DecoderSpec) -> HeadShape {
    HeadShape { group: spec.q_heads / spec.kv_heads, head_dim: spec.head_dim, block_tokens: BLOCK_TOKENS }
}

/// Starts an executor: plans the memory, copies or makes the weights, pins host memory, compiles the kernels.
///
/// # Errors
/// When the plan does not fit, before anything is read; or when the device refuses.
pub fn start(config: &Config, weights: &Weights<'_>, options: CudaOptions) -> CliResult<CudaExecutor> {
    let store = match &options.residency {
        Residency::Sparse(sparse) if sparse.through_store => {
            Some(config.store.build().map_err(|error| CliError::from(spec_error(Role::Store, error)))?)
        }
        _ => None,
    };
    start_over(config, weights, options, store)
}

/// The same over a store that KV goes through, where the options say so.
///
/// # Errors
/// As [`start`].
pub fn start_over(
    config: &Config,
    weights: &Weights<'_>,
    mut options: CudaOptions,
    store: Option<Arc<dyn KvStore>>,
) -> CliResult<CudaExecutor> {
    let device = Device::open(config.device.ordinal)?;
    let mut parts = HostParts { store, ..HostParts::default() };
    if let Residency::Sparse(sparse) = &mut options.residency {
        if let Some(bridge) = sparse.bridge() {
            tracing::warn!("{}", bridge_notice(sparse, bridge));
            parts.policies = Some(host_policies(config, weights.spec())?);
        }
        if sparse.follows_link && sparse.bridge().is_none() {
            let failure = |error| CliError::from(spec_error(Role::Selector, error));
            parts.selector = Some(config.selector.build().map_err(failure)?);
        }
        if let Some(DeviceLink::Gather { ctas, depth }) = config.transport.device_link() {
            let head_dim = weights.spec().head_dim;
            sparse.gather = oasis_cuda::measure::gather_options(&device, head_dim, ctas, depth)?;
        }
    }
    // Only a draft query needs the head on the device.
    let drafts = matches!(&options.residency, Residency::Sparse(sparse) if sparse.source == QuerySource::Draft);
    let (spec, head) = match weights {
        Weights::Loaded(loaded) => (&loaded.spec, loaded.head.as_deref().map(|head| &head.spec)),
        Weights::Random(spec, head) => (*spec, Some(*head)),
    };
    let head = head.filter(|_| drafts);
    // What does not fit is for the operator to change.
    let plan = CudaExecutor::plan(&device, spec, head, &options).map_err(|error| CliError::Input(error.to_string()))?;
    tracing::info!("{plan}");
    check_host_memory(plan.host)?;
    let model = match weights {
        Weights::Loaded(loaded) => {
            let head = loaded.head.as_deref().filter(|_| drafts);
            DeviceModel::upload(&device, spec, &loaded.weights, head, options.max_context)?
        }
        Weights::Random(..) => DeviceModel::random(&device, spec, head, options.max_context, 1)?,
    };
    let bar = Progress::parts("pinning host memory");
    let progress = |done, total| bar.set(done as u64, total as u64);
    Ok(CudaExecutor::with_host_parts(&device, model, plan, options, parts, &progress)?)
}

/// Starts an executor for a checkpoint.
///
/// # Errors
/// As [`options`] and [`start`], and when weights cannot be read.
pub fn start_model(resolved: &Resolved, model: &Model) -> CliResult<CudaExecutor> {
    let options = options(resolved, model.checkpoint.spec(), model.head.is_some())?;
    let loaded = super::load_weights(&resolved.config, model)?;
    start(&resolved.config, &Weights::Loaded(&loaded), options)
}

#[cfg(test)]
mod tests;
