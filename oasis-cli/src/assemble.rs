//! From a configuration to an executor: device, model, policies, memories.

pub mod cuda;

use crate::error::{CliError, CliResult};
use crate::progress::Progress;
use oasis_core::config::{Budget, Config, ConfigError, DeviceKind, KvConfig, Resolved, WeightDtype};
use oasis_core::executor::Executor;
use oasis_core::geometry::{KvDtype, KvGeometry};
use oasis_core::memory::{KvStore, Transport};
use oasis_core::pipeline::Tracer;
use oasis_core::policy::{Predictor, QuerySource, Selector, SpecError, Summarizer};
use oasis_core::registry::Role;
use oasis_cuda::CudaUnavailable;
use oasis_models::checkpoint::{self, Checkpoint, EMBEDDED_HEADS, HeadCheckpoint, Precision};
use oasis_models::cpu::{CpuExecutor, CpuModel, CpuOptions, Residency, SparseParts, fingerprint};
use oasis_models::draft::Eagle3Head;
use oasis_models::spec::DecoderSpec;
use oasis_models::weights::DecoderWeights;
use std::sync::Arc;

/// An opened model and its draft head: everything but the weights.
pub struct Model {
    /// The target model.
    pub checkpoint: Checkpoint,
    /// The draft head, where there is one, checked against the target.
    pub head: Option<HeadCheckpoint>,
}

/// The five roles, built.
pub struct Policies {
    /// Summarises blocks.
    pub summarizer: Arc<dyn Summarizer>,
    /// Ranks them.
    pub predictor: Box<dyn Predictor>,
    /// Plans admissions.
    pub selector: Box<dyn Selector>,
    /// Moves entries.
    pub transport: Box<dyn Transport>,
    /// Holds the full KV.
    pub store: Arc<dyn KvStore>,
}

impl Policies {
    fn residency(self, kv: &KvConfig) -> Residency {
        let Self { summarizer, predictor, selector, transport, store } = self;
        match kv.budget_blocks {
            Budget::All => Residency::Dense,
            Budget::Blocks(budget_blocks) => {
                let (dense_layers, draft_window) = (kv.dense_layers, kv.draft_window());
                Residency::Sparse(SparseParts {
                    budget_blocks,
                    dense_layers,
                    draft_window,
                    summarizer,
                    predictor,
                    selector,
                    transport,
                    store,
                })
            }
        }
    }
}

/// Refuses a device that this build or machine does not have.
///
/// # Errors
/// [`CudaUnavailable`] for `device.kind = "cuda"`.
pub fn check_device(config: &Config) -> Result<(), CudaUnavailable> {
    match config.device.kind {
        DeviceKind::Cpu => Ok(()),
        DeviceKind::Cuda => CudaUnavailable::check(&oasis_cuda::probe(), config.device.ordinal),
    }
}

/// Opens configuration, tokenizer and tensor tables of the model and of its draft head; reads no weights.
///
/// # Errors
/// When a file is missing or damaged, the family is not supported, or the head belongs to another model.
pub fn open_model(config: &Config) -> CliResult<Model> {
    let checkpoint = checkpoint::open(&config.model.path)?;
    checkpoint.check_weights()?;
    let head = match draft_source(config) {
        None => None,
        Some(source) => {
            let head = checkpoint::open_head(&source)?;
            head.check_fits(checkpoint.spec())?;
            head.check_weights()?;
            Some(head)
        }
    };
    Ok(Model { checkpoint, head })
}

/// Which draft head is meant: `auto` is the embedded head of an embedded model.
fn draft_source(config: &Config) -> Option<String> {
    match config.model.draft.as_str() {
        "none" => None,
        "auto" => Some(format!("{}-eagle3", config.model.path)).filter(|name| EMBEDDED_HEADS.contains(&name.as_str())),
        source => Some(source.to_owned()),
    }
}

/// Builds the five roles for a model and checks that everything fits together.
///
/// # Errors
/// Names the key that has an impossible value, and where the value came from.
pub fn build_policies(resolved: &Resolved, model: &Model) -> CliResult<Policies> {
    let config = &resolved.config;
    let shape = geometry(config, model.checkpoint.spec()).head_shape();
    let locate = |role| move |error| CliError::from(resolved.locate(spec_error(role, error)));
    let policies = Policies {
        summarizer: config.summarizer.build(shape).map_err(locate(Role::Summarizer))?.into(),
        predictor: config.predictor.build().map_err(locate(Role::Predictor))?,
        selector: build_selector(resolved)?,
        transport: config.transport.build().map_err(locate(Role::Transport))?,
        store: build_store(resolved)?,
    };
    check_fit(resolved, &*policies.predictor, model)?;
    Ok(policies)
}

/// Builds the selector alone, which needs no model.
///
/// # Errors
/// Names the key that has an impossible value, and where the value came from.
pub fn build_selector(resolved: &Resolved) -> CliResult<Box<dyn Selector>> {
    let built = resolved.config.selector.build();
    built.map_err(|error| CliError::from(resolved.locate(spec_error(Role::Selector, error))))
}

/// Builds the store alone, which needs no model either.
///
/// # Errors
/// Names the key that has an impossible value, and where the value came from.
pub fn build_store(resolved: &Resolved) -> CliResult<Arc<dyn KvStore>> {
    let built = resolved.config.store.build();
    built.map_err(|error| CliError::from(resolved.locate(spec_error(Role::Store, error))))
}

/// An error of one field of a role's spec.
fn spec_error(role: Role, error: SpecError) -> ConfigError {
    let key = format!("{}.{}", role.section(), error.field);
    let located = ConfigError::new(key, error.expected, error.found);
    match error.hint {
        Some(hint) => located.hint(hint),
        None => located,
    }
}

/// Shape of the KV cache of a model under a configuration.
pub fn geometry(config: &Config, spec: &DecoderSpec) -> KvGeometry {
    KvGeometry {
        layers: spec.layers,
        q_heads: spec.q_heads,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        block_tokens: config.kv.block_tokens,
        dtype: KvDtype::F32,
    }
}

/// Checks what no part can check alone: that a predictor which ranks by the draft token has a draft head, and that one
/// request's working set fits the device.
fn check_fit(resolved: &Resolved, predictor: &dyn Predictor, model: &Model) -> CliResult {
    let config = &resolved.config;
    let Budget::Blocks(blocks) = config.kv.budget_blocks else { return Ok(()) };
    if predictor.query_source() == QuerySource::Draft && model.head.is_none() {
        let error =
            ConfigError::new("model.draft", "a draft head, as the predictor ranks by a draft token's query", "none")
                .hint("name an EAGLE-3 head of this model, or choose a predictor that needs none: predictor.kind");
        return Err(resolved.locate(error).into());
    }
    let limit = config.device.kv_memory.0;
    let needed = working_set_bytes(&geometry(config, model.checkpoint.spec()), blocks);
    if limit > 0 && needed > limit {
        let error = ConfigError::new(
            "kv.budget_blocks",
            format!("a working set within device.kv_memory = {}", config.device.kv_memory),
            format!("{blocks} blocks, {} a request", crate::text::size(needed)),
        )
        .hint("choose fewer blocks or more memory");
        return Err(resolved.locate(error).into());
    }
    Ok(())
}

/// Bytes of one request's working set of `blocks` blocks and its tail block, all layers and heads.
pub fn working_set_bytes(geometry: &KvGeometry, blocks: usize) -> u64 {
    geometry.dense_bytes((blocks + 1) * geometry.block_tokens)
}

/// Weights of a model and its draft head, read into host memory.
pub struct Loaded {
    /// Shape and arithmetic.
    pub spec: DecoderSpec,
    /// The decoder's.
    pub weights: DecoderWeights,
    /// The draft head's.
    pub head: Option<Arc<Eagle3Head>>,
}

impl Loaded {
    /// A number that is equal where the same tokens come out; see [`oasis_models::cpu::fingerprint`].
    pub fn fingerprint(&self) -> u64 {
        fingerprint(&self.spec, &self.weights, self.head.as_deref())
    }

    /// The weights for the CPU; executors share them.
    pub fn on_cpu(self) -> Arc<CpuModel> {
        Arc::new(CpuModel::new(self.spec, self.weights, self.head))
    }
}

/// Reads the weights of the model and its draft head.
///
/// # Errors
/// When a file cannot be read or changed since it was opened.
pub fn load_weights(config: &Config, model: &Model) -> CliResult<Loaded> {
    let spec = model.checkpoint.spec();
    let precision = match config.model.dtype {
        WeightDtype::Auto => Precision::Auto,
        WeightDtype::F32 => Precision::F32,
        WeightDtype::Bf16 => Precision::Bf16,
    };
    let bar = Progress::parts("loading weights");
    let weights = model.checkpoint.load_weights(precision, &mut |progress| bar.set(progress.done, progress.total))?;
    let head = match &model.head {
        Some(head) => Some(Arc::new(head.load(spec, precision, &mut |_| ())?)),
        None => None,
    };
    let provenance = model.checkpoint.provenance();
    tracing::info!(model = %provenance.name, dtype = provenance.dtype, bytes = provenance.file_bytes, "weights loaded");
    Ok(Loaded { spec: spec.clone(), weights, head })
}

/// Reads the weights for the CPU; executors share them.
///
/// # Errors
/// As [`load_weights`].
pub fn load_model(config: &Config, model: &Model) -> CliResult<Arc<CpuModel>> {
    Ok(load_weights(config, model)?.on_cpu())
}

/// Starts an executor on loaded weights. It starts threads and reserves nothing yet.
///
/// # Errors
/// When the machine gives no threads.
pub fn start_executor(
    config: &Config,
    weights: Arc<CpuModel>,
    policies: Policies,
    tracer: Tracer,
) -> CliResult<CpuExecutor> {
    let executor = CpuExecutor::new(weights, policies.residency(&config.kv), cpu_options(config), tracer)?;
    let info = executor.info();
    tracing::info!(device = %info.device, budget = %config.kv.budget_blocks, cap = info.cap, "executor started");
    Ok(executor)
}

/// Sizes of a CPU executor.
pub fn cpu_options(config: &Config) -> CpuOptions {
    CpuOptions {
        block_tokens: config.kv.block_tokens,
        prefill_chunk: config.prefill_chunk(),
        threads: config.device.threads,
        kv_memory: config.device.kv_memory.0,
    }
}
