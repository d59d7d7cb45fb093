//! The CUDA executor: prefill, decode steps as graphs, working sets that a gather fills from host memory.

mod admission;
mod ahead;
mod bridge;
mod choices;
mod copy_engine;
mod correct;
mod decoding;
mod draft;
mod experts;
mod first;
mod hand_over;
mod host;
mod host_rows;
mod host_side;
mod inspect;
mod layer;
mod link;
mod memory;
mod mixture;
mod options;
mod parts;
mod plan;
mod prefill;
mod programs;
mod reading;
mod request;
mod sampler;
mod sampling;
mod scope;
mod stages;
mod staging;
mod step;
mod store_link;
mod synthetic;
mod timeline;

pub use host_rows::HostPolicies;
pub use inspect::Selection;
pub use options::{Bridge, CudaOptions, GatherOptions, HostOptions, Residency, SparseOptions, StepMode};
pub use plan::{MemoryPlan, RequestPlan};
pub use synthetic::StepBytes;

use crate::device::{Device, DeviceError, Graph, Priority};
use crate::gemm::{GemmOptions, Gemms};
use crate::kernels::{CopyList, LinearStream};
use crate::layout::entry_bytes;
use crate::model::DeviceModel;
use copy_engine::list_landing;
use host::HostPool;
use host_side::HostSide;
use link::LinkFollower;
use memory::{MOST_ROWS, Memory};
use mixture::ExpertShape;
use oasis_core::executor::{
    Admission, DecodeRow, Executor, ExecutorInfo, ExecutorStats, PrefillProgress, RequestError, Sequence,
};
use oasis_core::geometry::{KvFootprint, KvGeometry};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::memory::KvStore;
use oasis_core::pipeline::Tracer;
use oasis_core::policy::Selector;
use parts::{BesideDecode, Events, Parts, Streams};
use plan::Extent;
use programs::Programs;
use reading::PrefillError;
use request::{Phase, Request};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use store_link::StoreLink;
use timeline::Mark;

/// A captured step.
struct StepGraph {
    graph: Graph,
    /// Events around its operations, where steps are traced.
    marks: Vec<Mark>,
}

/// What the host does in a step.
#[derive(Default)]
pub struct HostParts {
    /// Policies without device code: see [`SparseOptions::bridge`].
    pub policies: Option<HostPolicies>,
    /// The store of [`SparseOptions::through_store`].
    pub store: Option<Arc<dyn KvStore>>,
    /// The selector of [`SparseOptions::follows_link`], where the device selects.
    pub selector: Option<Box<dyn Selector>>,
}

/// Runs a decoder on a GPU, with the KV cache outside its memory.
pub struct CudaExecutor {
    info: ExecutorInfo,
    // Graphs use the memory of `parts`: they go first. One for a number of rows, another where top-k or top-p leave
    // tokens of some row out.
    graphs: BTreeMap<(usize, bool), StepGraph>,
    parts: Parts,
    /// Request of each row.
    rows: Vec<Option<RequestId>>,
    requests: BTreeMap<RequestId, Request>,
    tracer: Tracer,
    /// The request whose full KV the last prefill left on the device, or as many layers of it as have a place of their own.
    staged: Option<RequestId>,
    /// Whether the last step left transfers to the next one.
    transfers_left: bool,
    steps: u64,
    tokens: u64,
    device_bytes: KvFootprint,
    device_peak: KvFootprint,
}

impl CudaExecutor {
    /// How the device's memory would be used; `memory_limit` or what is free now is divided.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver, or when nothing fits, or for a mixture of experts that the kernels do not run.
    pub fn plan(
        device: &Device,
        spec: &oasis_models::spec::DecoderSpec,
        head: Option<&oasis_models::draft::Eagle3Spec>,
        options: &CudaOptions,
    ) -> Result<MemoryPlan, DeviceError> {
        // Better now than after the weights have been read.
        ExpertShape::of(spec)?;
        let (free, _) = device.memory()?;
        let limit = options.memory_limit.map_or(free as u64, |limit| limit.min(free as u64));
        let options = CudaOptions { max_batch: options.max_batch.min(MOST_ROWS), ..options.clone() };
        let plan = MemoryPlan::new(limit, spec, head, &options);
        if plan.requests == 0 {
            let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
            let problem = format!(
                "expected room for at least one request: weights {:.2} GiB, scratch {:.2} GiB, full KV of a prefill {:.2} GiB \
                 and a request of {} tokens {:.2} GiB, found {:.2} GiB",
                gib(plan.weights),
                gib(plan.scratch),
                gib(plan.prefill),
                options.max_context,
                gib(plan.request.total()),
                gib(limit)
            );
            let hint = match MemoryPlan::longest_context(limit, spec, head, &options) {
                Some(tokens) => format!("device.max_context = {tokens} would fit"),
                None => "a smaller model, or a card with more memory".to_owned(),
            };
            return Err(DeviceError::new("planning device memory", problem).hint(hint));
        }
        Ok(plan)
    }

    /// Sets everything up: compiles kernels, allocates and pins memory. `progress` hears of pinned bytes.
    ///
    /// # Errors
    /// [`DeviceError`] when a kernel or a policy's device code does not compile, or when memory is short: then before
    /// anything runs.
    pub fn new(
        device: &Device,
        model: DeviceModel,
        plan: MemoryPlan,
        options: CudaOptions,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, DeviceError> {
        Self::with_host_parts(device, model, plan, options, HostParts::default(), progress)
    }

    /// The same with what the host does in a step.
    ///
    /// # Errors
    /// As [`CudaExecutor::new`], and when there is no part that the options need.
    pub fn with_host_parts(
        device: &Device,
        model: DeviceModel,
        plan: MemoryPlan,
        mut options: CudaOptions,
        host_parts: HostParts,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Self, DeviceError> {
        if options.needs_host() {
            options.mode = StepMode::Streams;
        }
        let spec = model.spec.clone();
        let extent = Extent::new(&options);
        let head = model.head.as_ref().map(|head| head.spec.clone()).filter(|_| extent.queries == 2);
        let compiler = device.compiler()?;
        let programs = Programs::load(device, &compiler, &spec, head.as_ref(), &options)?;
        // Dense steps have nothing beside them.
        let stream_rows = match options.residency {
            Residency::Dense => LinearStream::MOST_ROWS,
            Residency::Sparse(_) => GemmOptions::default().stream_rows,
        };
        let gemms = Gemms::open(device, GemmOptions { stream_rows, ..GemmOptions::default() })?;
        let experts = programs.experts.as_ref().map(|programs| programs.shape);
        let memory = Memory::new(device, &spec, head.as_ref(), experts, &options, &plan)?;
        let geometry = plan::geometry(&spec);
        let (mut host, mut budget_blocks, mut cap) = (None, None, 0);
        let (mut host_side, mut landing, mut store_link, mut link_follower) = (None, None, None, None);
        if let Residency::Sparse(sparse) = &options.residency {
            if sparse.needs_device() && sparse.bridge().is_some() {
                let problem =
                    "expected policies with device code, as choices are made again or a layer ahead; found one without";
                return Err(
                    DeviceError::new("starting an executor", problem).hint("the CPU executor runs every policy")
                );
            }
            if let Some(bridge) = sparse.bridge() {
                let policies = host_parts.policies.ok_or_else(|| {
                    let problem = "expected policies for the host to run, as not all have device code; found none";
                    DeviceError::new("starting an executor", problem)
                })?;
                let sizes = (geometry, extent, plan.requests);
                host_side = Some(RefCell::new(HostSide::new(device, policies, sparse, bridge, sizes)?));
            }
            if sparse.follows_link && sparse.bridge().is_none() {
                let selector = host_parts.selector.ok_or_else(|| {
                    let problem = "expected the selector, whose cap follows the link; found none";
                    DeviceError::new("starting an executor", problem)
                })?;
                let (caps, sizes) = ((extent.slots, sparse.cap), (spec.layers, spec.kv_heads));
                link_follower = Some(RefCell::new(LinkFollower::new(device, selector, caps, sizes)?));
            }
            if sparse.copy_engine {
                let copies = plan.requests * geometry.kv_heads * (extent.slots + 2);
                landing = Some(list_landing(device, copies)?);
            }
            if sparse.through_store {
                let store = host_parts.store.ok_or_else(|| {
                    DeviceError::new("starting an executor", "expected the store that KV is to go through, found none")
                })?;
                let sizes = (geometry, extent, plan.requests);
                store_link = Some(RefCell::new(StoreLink::new(device, store, sparse, sizes)?));
            } else {
                let bytes = plan.host;
                let report = |done: usize| progress(done, bytes as usize);
                host = Some(HostPool::new(device, bytes, sparse.host.alias, &report)?);
            }
            (budget_blocks, cap) = (Some(sparse.budget_blocks), sparse.cap);
        }
        let stream = |priority| device.stream(priority);
        let streams = Streams {
            foreground: stream(Priority::Middle)?,
            predict: stream(Priority::Low)?,
            transfer: stream(Priority::High)?,
            prefill: stream(Priority::Low)?,
            offload: stream(Priority::Low)?,
        };
        let events = || (0..spec.layers).map(|_| device.event()).collect::<Result<Vec<_>, _>>();
        let events = Events {
            order: device.event()?,
            transferred: events()?,
            appended: events()?,
            copied: events()?,
            prefilled: events()?,
        };
        let workspaces = [gemms.workspace()?, gemms.workspace()?];
        let beside_decode = (options.prefill_multiprocessors)
            .filter(|count| *count < device.facts.multiprocessors)
            .map(|count| BesideDecode::new(device, &gemms, count))
            .transpose()?;
        let info = ExecutorInfo {
            device: described(device, &options),
            geometry,
            budget_blocks,
            cap,
            vocab: spec.vocab,
            max_context: options.max_context.min(spec.max_positions),
        };
        let rows = vec![None; plan.requests];
        let device = device.clone();
        let parts = Parts {
            device,
            model,
            options,
            extent,
            plan,
            memory,
            host,
            programs,
            gemms,
            beside_decode,
            workspaces,
            streams,
            events,
            marks: RefCell::new(None),
            host_side,
            link_follower,
            list_landing: landing,
            store_link,
        };
        Ok(Self {
            info,
            graphs: BTreeMap::new(),
            parts,
            rows,
            requests: BTreeMap::new(),
            tracer: Tracer::default(),
            staged: None,
            transfers_left: false,
            steps: 0,
            tokens: 0,
            device_bytes: KvFootprint::default(),
            device_peak: KvFootprint::default(),
        })
    }

    /// How the device's memory is used.
    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.parts.plan
    }

    /// Records what the device does in the steps to come. Events around every operation slow a step down a little.
    pub fn set_tracer(&mut self, tracer: Tracer) {
        self.tracer = tracer;
        self.graphs.clear();
    }

    fn lists(&self) -> Vec<CopyList> {
        let lists = self.parts.memory.sparse.as_ref().map(|sparse| sparse.lists.read());
        lists.and_then(Result::ok).unwrap_or_default()
    }
}

/// The device's name, and what it leaves to the host.
fn described(device: &Device, options: &CudaOptions) -> String {
    let bridge = match &options.residency {
        Residency::Sparse(sparse) => sparse.bridge(),
        Residency::Dense => None,
    };
    let name = match &options.residency {
        Residency::Sparse(sparse) if sparse.through_store => format!("{}, KV through a store", device.facts.name),
        _ => device.facts.name.clone(),
    };
    match bridge {
        None => name,
        Some(Bridge::Selection) => format!("{name}, selection on the host"),
        Some(Bridge::Prediction) => format!("{name}, prediction and selection on the host"),
    }
}

impl Executor for CudaExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn admit(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        self.set_aside(sequence, false)
    }

    fn prefill(&mut self, id: RequestId) -> Result<PrefillProgress, RequestError> {
        self.try_prefill(id).map_err(|error| {
            let problem = match error {
                PrefillError::Request(problem) => problem,
                PrefillError::Device(error) => format!("request {id}: {error}"),
            };
            if let Some(request) = self.requests.get_mut(&id) {
                request.phase = Phase::Failed(problem.clone());
            }
            RequestError(problem)
        })
    }

    fn begins_alone(&self) -> bool {
        self.info.budget_blocks.is_some()
    }

    fn decode(&mut self, rows: &[DecodeRow]) -> anyhow::Result<Vec<Result<TokenId, RequestError>>> {
        let step = self.steps + 1;
        self.try_decode(rows).map_err(|error| anyhow::Error::new(error).context(format!("decode step {step}")))
    }

    fn release(&mut self, id: RequestId) {
        let Some(request) = self.requests.remove(&id) else { return };
        // On a lost device nothing is under way any more.
        let _ = self.settle();
        if !matches!(request.phase, Phase::Decode | Phase::First) {
            let _ = self.parts.prefill().stream.synchronize();
            let _ = self.parts.streams.offload.synchronize();
        }
        self.vacate(id, &request);
        if let Some(host) = &mut self.parts.host {
            host.release(id);
        }
        if let Some(link) = &self.parts.store_link {
            link.borrow_mut().release(id);
        }
    }

    fn stats(&self) -> ExecutorStats {
        let lists = self.lists();
        let admitted: u64 = lists.iter().map(|list| list.admitted).sum();
        let KvGeometry { layers, kv_heads, head_dim, .. } = self.info.geometry;
        // A row that chooses again may admit again.
        let corrected = correct::corrected_rows(self.parts.memory.sparse.as_ref()).unwrap_or(0);
        ExecutorStats {
            steps: self.steps,
            tokens: self.tokens,
            filled_entries: lists.iter().map(|list| list.filled).sum(),
            admitted_entries: admitted,
            link_bytes: admitted * entry_bytes(head_dim) as u64,
            deferred_entries: lists.iter().map(|list| list.deferred).sum(),
            cap_entries: (self.tokens * layers as u64 + corrected) * (kv_heads * self.info.cap) as u64,
            device: self.device_bytes,
            device_peak: self.device_peak,
            store: self.parts.store_usage(),
            ..ExecutorStats::default()
        }
    }
}
