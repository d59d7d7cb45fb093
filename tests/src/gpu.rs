//! Executors on a GPU, and how what they say is compared with a reference.

use crate::models;
use oasis_core::config::{Config, Layer, Resolved};
use oasis_core::engine::{Engine, Event};
use oasis_core::executor::{DecodeRow, Executor, Logits};
use oasis_core::geometry::HeadShape;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::testkit::Random;
use oasis_cuda::device::{Device, DeviceError};
use oasis_cuda::executor::{
    CudaExecutor, CudaOptions, GatherOptions, HostOptions, HostParts, Residency, SparseOptions, StepMode,
};
use oasis_cuda::model::DeviceModel;
use oasis_models::checkpoint::{self, Precision};
use oasis_models::cpu::{CpuExecutor, CpuModel};
use oasis_models::draft::Eagle3Head;
use oasis_models::spec::DecoderSpec;
use oasis_models::weights::{DecoderWeights, Matrix, MatrixData, Mlp};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A model for both devices.
pub struct Twin {
    /// Shape and arithmetic.
    pub spec: DecoderSpec,
    /// The decoder's weights.
    pub weights: DecoderWeights,
    /// The draft head.
    pub head: Arc<Eagle3Head>,
    /// The same on the CPU.
    pub cpu: Arc<CpuModel>,
}

impl Twin {
    /// From weights.
    pub fn new(spec: DecoderSpec, weights: DecoderWeights, head: Arc<Eagle3Head>) -> Self {
        let cpu = Arc::new(CpuModel::new(spec.clone(), weights.clone(), Some(head.clone())));
        Self { spec, weights, head, cpu }
    }

    /// From a checkpoint and its draft head.
    ///
    /// # Panics
    /// When either cannot be loaded.
    pub fn load(model: &str, draft: &str) -> Self {
        let checkpoint = checkpoint::open(model).unwrap();
        let weights = checkpoint.load_weights(Precision::Bf16, &mut |_| {}).unwrap();
        let spec = checkpoint.spec().clone();
        let head = checkpoint::open_head(draft).unwrap().load(&spec, Precision::Bf16, &mut |_| {}).unwrap();
        Self::new(spec, weights, Arc::new(head))
    }

    /// The same on the CPU with every weight of a layer off by up to the largest rounding error of bf16, 2^-8: how far
    /// rounding alone carries this model away from itself.
    pub fn disturbed(&self) -> Arc<CpuModel> {
        let (mut weights, random) = (self.weights.clone(), &mut Random::new(41));
        for layer in &mut weights.layers {
            let mut matrices = vec![&mut layer.attention.qkv, &mut layer.attention.o];
            match &mut layer.mlp {
                Mlp::Dense(mlp) => matrices.extend([&mut mlp.gate_up, &mut mlp.down]),
                Mlp::Moe { router, experts } => {
                    matrices.push(router);
                    matrices.extend(experts.iter_mut().flat_map(|mlp| [&mut mlp.gate_up, &mut mlp.down]));
                }
            }
            matrices.into_iter().for_each(|matrix| disturb(matrix, random));
        }
        Arc::new(CpuModel::new(self.spec.clone(), weights, Some(self.head.clone())))
    }
}

fn disturb(matrix: &mut Matrix, random: &mut Random) {
    let values: Vec<f32> = match &matrix.data {
        MatrixData::F32(data) => data.clone(),
        MatrixData::Bf16(data) => data.iter().map(|x| x.to_f32()).collect(),
    };
    let errors = random.floats(values.len());
    matrix.data = MatrixData::F32(values.iter().zip(errors).map(|(x, error)| x * (1.0 + error / 256.0)).collect());
}

/// Choices of an executor on a GPU.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Blocks per KV head on the device; `None` is dense decoding.
    pub budget: Option<usize>,
    /// Policies, as `key=value` over the defaults.
    pub settings: Vec<String>,
    /// Rows.
    pub max_batch: usize,
    /// Tokens.
    pub max_context: usize,
    /// Prompt tokens that pass the MLP at a time.
    pub prefill_chunk: usize,
    /// Layers whose full KV a prefill keeps on the device.
    pub prefill_layers: Option<usize>,
    /// Bytes of host memory.
    pub host: u64,
    /// How steps reach the device.
    pub mode: StepMode,
}

impl Setup {
    /// Dense decoding.
    pub fn dense(max_batch: usize, max_context: usize) -> Self {
        Self {
            budget: None,
            settings: Vec::new(),
            max_batch,
            max_context,
            prefill_chunk: 1024,
            prefill_layers: None,
            host: 1 << 30,
            mode: StepMode::Graph,
        }
    }

    /// Sparse decoding with policies from settings.
    pub fn sparse(budget: usize, settings: &[&str], max_batch: usize, max_context: usize) -> Self {
        let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
        Self { budget: Some(budget), settings, ..Self::dense(max_batch, max_context) }
    }

    fn config(&self) -> Config {
        let layers: Vec<Layer> = self.settings.iter().map(|s| Layer::assignment("--set", s).unwrap()).collect();
        Resolved::new(&layers).unwrap().config
    }

    /// What the executor is told.
    ///
    /// # Panics
    /// When a setting is wrong.
    pub fn options(&self, spec: &DecoderSpec) -> CudaOptions {
        let config = self.config();
        let shape = HeadShape { group: spec.q_heads / spec.kv_heads, head_dim: spec.head_dim, block_tokens: 16 };
        let residency = match self.budget {
            None => Residency::Dense,
            Some(budget_blocks) => {
                let summarizer = config.summarizer.build(shape).unwrap();
                let predictor = config.predictor.build().unwrap();
                let selector = config.selector.build().unwrap();
                Residency::Sparse(Box::new(SparseOptions {
                    budget_blocks,
                    cap: selector.cap(budget_blocks).min(budget_blocks),
                    source: predictor.query_source(),
                    correction: predictor.correction(),
                    ranking: Some(predictor.by_score().expect("a predictor that ranks by score")),
                    summary_bytes: summarizer.device_bytes(shape),
                    summarizer: Some(summarizer.device_code().expect("a summarizer with device code")),
                    selector: Some(selector.device_code().expect("a selector with device code")),
                    follows_link: selector.cap_by_link(budget_blocks, 1, None).is_some(),
                    copy_engine: false,
                    gather: GatherOptions::default(),
                    host: HostOptions { capacity: self.host, alias: None },
                    draft_window: config.kv.draft_window(),
                    through_store: false,
                    observed: false,
                }))
            }
        };
        CudaOptions {
            residency,
            max_batch: self.max_batch,
            max_context: self.max_context,
            memory_limit: None,
            prefill_chunk: self.prefill_chunk,
            prefill_multiprocessors: Some(64),
            prefill_layers: self.prefill_layers,
            mode: self.mode,
        }
    }

    /// Starts an executor.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn start(&self, device: &Device, model: &Twin) -> CudaExecutor {
        let parts = HostParts { selector: Some(self.config().selector.build().unwrap()), ..HostParts::default() };
        start_with(device, model, self.options(&model.spec), parts).unwrap()
    }
}

/// Starts an executor.
///
/// # Errors
/// When the device refuses, or the code of a policy does not compile.
pub fn start(device: &Device, model: &Twin, options: CudaOptions) -> Result<CudaExecutor, DeviceError> {
    start_with(device, model, options, HostParts::default())
}

/// Starts an executor with what the host does in a step.
///
/// # Errors
/// As [`start`].
pub fn start_with(
    device: &Device,
    model: &Twin,
    options: CudaOptions,
    parts: HostParts,
) -> Result<CudaExecutor, DeviceError> {
    let drafts = matches!(&options.residency, Residency::Sparse(sparse) if sparse.source == oasis_core::policy::QuerySource::Draft);
    let head = Some(&*model.head).filter(|_| drafts);
    let plan = CudaExecutor::plan(device, &model.spec, head.map(|head| &head.spec), &options)?;
    let on_device = DeviceModel::upload(device, &model.spec, &model.weights, head, options.max_context)?;
    CudaExecutor::with_host_parts(device, on_device, plan, options, parts, &|_, _| ())
}

/// What one request said, token by token.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Speech {
    /// Greedy tokens.
    pub tokens: Vec<TokenId>,
    /// Logits behind each.
    pub logits: Vec<Vec<f32>>,
}

impl Speech {
    /// A request's first token has come: `tokens` in all, the next one run being that of `along`, or its own.
    fn go_on(mut self, executor: &mut impl Logits, id: RequestId, tokens: usize, along: Option<&[TokenId]>) -> Self {
        self.logits.push(executor.last_logits(id).unwrap());
        while self.tokens.len() < tokens {
            let last = self.tokens.len() - 1;
            let next = models::step(executor, id, along.map_or(self.tokens[last], |along| along[last]));
            self.tokens.push(next);
            self.logits.push(executor.last_logits(id).unwrap());
        }
        executor.release(id);
        self
    }

    /// What a request says alone.
    pub fn alone(executor: &mut impl Logits, prompt: &[TokenId], tokens: usize) -> Self {
        let id = RequestId(1_000_000);
        let first = models::start(executor, id, prompt, tokens);
        Self { tokens: vec![first], logits: Vec::new() }.go_on(executor, id, tokens, None)
    }

    /// What a request would say at each place along given tokens.
    pub fn along(executor: &mut impl Logits, prompt: &[TokenId], along: &[TokenId]) -> Self {
        let id = RequestId(1_000_000);
        let first = models::start(executor, id, prompt, along.len());
        Self { tokens: vec![first], logits: Vec::new() }.go_on(executor, id, along.len(), Some(along))
    }

    /// What the CPU says after a prompt that has been read.
    ///
    /// # Panics
    /// When the request is not taken.
    pub fn resumed(executor: &mut CpuExecutor, state: &oasis_models::cpu::PromptState, tokens: usize) -> Self {
        let id = RequestId(1_000_000);
        let first = executor.resume(state, id, tokens, oasis_core::sampling::SamplingParams::default()).unwrap();
        Self { tokens: vec![first], logits: Vec::new() }.go_on(executor, id, tokens, None)
    }

    /// The same along given tokens.
    ///
    /// # Panics
    /// When the request is not taken.
    pub fn resumed_along(
        executor: &mut CpuExecutor,
        state: &oasis_models::cpu::PromptState,
        along: &[TokenId],
    ) -> Self {
        let id = RequestId(1_000_000);
        let first = executor.resume(state, id, along.len(), oasis_core::sampling::SamplingParams::default()).unwrap();
        Self { tokens: vec![first], logits: Vec::new() }.go_on(executor, id, along.len(), Some(along))
    }

    /// How far the reference's logit of `token` at a place lies below its largest, in parts of the distance between the
    /// largest and the mean.
    pub fn gap(&self, place: usize, token: TokenId) -> f32 {
        let logits = &self.logits[place];
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mean = logits.iter().sum::<f32>() / logits.len() as f32;
        (largest - logits[token.index()]) / (largest - mean)
    }

    /// Compares with what another executor says at the same places.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn compare(&self, got: &Self) -> Parity {
        assert_eq!(got.tokens.len(), self.tokens.len());
        let mut parity = Parity::default();
        for (place, (want, token)) in self.tokens.iter().zip(&got.tokens).enumerate() {
            if token != want {
                parity.first.get_or_insert(place);
                parity.different += 1;
                parity.gap = parity.gap.max(self.gap(place, *token));
            }
        }
        parity.errors = self.logits.iter().zip(&got.logits).map(|(want, got)| relative_error(want, got)).collect();
        parity
    }
}

/// Root mean square of the differences over the standard deviation of the reference; 1, as for logits that have nothing
/// to do with it, at most.
fn relative_error(want: &[f32], got: &[f32]) -> f64 {
    assert_eq!(want.len(), got.len());
    let mean = want.iter().map(|x| f64::from(*x)).sum::<f64>() / want.len() as f64;
    let spread: f64 = want.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum();
    let difference: f64 = want.iter().zip(got).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    // Also of NaN.
    (difference / spread).sqrt().min(1.0)
}

/// How two executors differ.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Parity {
    /// Places with another token.
    pub different: usize,
    /// The first of them: where free runs part.
    pub first: Option<usize>,
    /// Largest [`Speech::gap`] of the reference at those.
    pub gap: f32,
    /// Difference of the logits at each place: root mean square, in standard deviations of the reference.
    pub errors: Vec<f64>,
}

impl Parity {
    /// Joins comparisons of other places.
    pub fn add(&mut self, other: &Self) {
        self.different += other.different;
        self.gap = self.gap.max(other.gap);
        self.errors.extend(&other.errors);
    }

    /// Median over the places.
    pub fn median(&self) -> f64 {
        let mut errors = self.errors.clone();
        errors.sort_unstable_by(f64::total_cmp);
        errors.get(errors.len() / 2).copied().unwrap_or(0.0)
    }

    /// Root mean square over the places.
    pub fn error(&self) -> f64 {
        (self.errors.iter().map(|e| e * e).sum::<f64>() / self.errors.len().max(1) as f64).sqrt()
    }
}

impl std::fmt::Display for Parity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (places, median, error) = (self.errors.len(), self.median(), self.error());
        let Self { different, first, gap, .. } = self;
        write!(f, "{different:>3} of {places} tokens differ, gap {gap:.4}, logits {error:.4}, median {median:.4}")?;
        first.map_or(Ok(()), |first| write!(f, ", first at {first}"))
    }
}

/// What requests said in an engine: tokens, and why one failed.
pub type Said = BTreeMap<RequestId, (Vec<TokenId>, Option<String>)>;

/// Steps until nothing waits or runs; `before` is called before each step with its number.
///
/// # Panics
/// When the device is lost, or the engine does not come to rest.
pub fn drive(engine: &mut Engine<CudaExecutor>, mut before: impl FnMut(&mut Engine<CudaExecutor>, usize)) -> Said {
    let mut said = Said::new();
    for number in 0.. {
        assert!(number < 100_000, "the engine does not come to rest");
        before(engine, number);
        if engine.is_idle() {
            break;
        }
        for event in engine.step().expect("the device is not lost") {
            match event {
                Event::Prefill { .. } | Event::Finished { .. } => {}
                Event::Token { request, token } => said.entry(request).or_default().0.push(token),
                Event::Refused { request, reason: error } | Event::Failed { request, error } => {
                    said.entry(request).or_default().1 = Some(error);
                }
            }
        }
    }
    said
}

/// One step of several requests.
///
/// # Panics
/// When the device is lost, or a request fails.
pub fn step_all(executor: &mut impl Executor, rows: &mut [(RequestId, Vec<TokenId>)]) {
    let inputs: Vec<DecodeRow> = rows
        .iter()
        .map(|(request, tokens)| DecodeRow { request: *request, token: *tokens.last().expect("a first token") })
        .collect();
    for ((_, tokens), next) in rows.iter_mut().zip(executor.decode(&inputs).unwrap()) {
        tokens.push(next.unwrap());
    }
}

/// Checks that no request holds anything.
///
/// # Panics
/// When something is held.
pub fn assert_nothing_held(executor: &CudaExecutor) {
    let stats = executor.stats();
    assert_eq!(stats.device, oasis_core::geometry::KvFootprint::default(), "device memory is held");
    assert_eq!((stats.store.reserved, stats.store.used, stats.store.requests), (0, 0, 0), "host memory is held");
}
