//! The CUDA executor: prefill, decode steps as graphs, working sets that a gather fills from host memory.

mod bridge;
mod copy_engine;
mod experts;
mod first;
mod host;
mod host_side;
mod inspect;
mod memory;
mod mixture;
mod options;
mod parts;
mod plan;
mod prefill;
mod programs;
mod request;
mod sampler;
mod sampling;
mod step;
mod synthetic;
mod timeline;

pub use host_side::HostPolicies;
pub use inspect::Selection;
pub use options::{Bridge, CudaOptions, GatherOptions, HostOptions, Residency, SparseOptions, StepMode};
pub use plan::{MemoryPlan, RequestPlan};
pub use synthetic::StepBytes;

use crate::device::{Device, DeviceError, Graph, Priority};
use crate::gemm::{GemmOptions, Gemms};
use crate::kernels::{CopyList, StepInput};
use crate::layout::{BLOCK_TOKENS, entry_bytes};
use crate::model::DeviceModel;
use copy_engine::list_landing;
use host::HostPool;
use host_side::HostSide;
use memory::{MOST_ROWS, Memory};
use mixture::ExpertShape;
use oasis_core::executor::{
    Admission, DecodeRow, Executor, ExecutorInfo, ExecutorStats, PrefillProgress, RequestError, Sequence,
};
use oasis_core::geometry::{KvDtype, KvFootprint, KvGeometry};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::memory::Reservation;
use oasis_core::pipeline::Tracer;
use oasis_core::sampling::SamplingParams;
use parts::{Events, Parts, Streams};
use plan::Extent;
use prefill::Prompt;
use programs::Programs;
use request::{Phase, Request};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Instant;
use step::{HostLayers, PADDING, Scope};
use timeline::Mark;

/// Layers of a prefill that may be queued before those before them are done: enough that the device never waits for the
/// host, few enough that a cancelled prefill ends soon.
const LAYERS_AHEAD: usize = 4;

/// A captured step.
struct StepGraph {
    graph: Graph,
    /// Events around its operations, where steps are traced.
    marks: Vec<Mark>,
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
    /// The request whose full KV the last prefill left on the device.
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
            let room = limit.saturating_sub(plan.fixed());
            let per_token = plan.request.total() as f64 / options.max_context as f64;
            let tokens = (room as f64 / per_token) as usize / BLOCK_TOKENS * BLOCK_TOKENS;
            return Err(DeviceError::new(
                "planning device memory",
                format!(
                    "expected room for at least one request: weights and scratch {:.2} GiB and a request of {} tokens {:.2} GiB, \
                     found {:.2} GiB",
                    gib(plan.fixed()),
                    options.max_context,
                    gib(plan.request.total()),
                    gib(limit)
                ),
            )
            .hint(if tokens > 0 {
                format!("engine.max_context = {tokens} would fit")
            } else {
                "a smaller model, or a card with more memory".to_owned()
            }));
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
        Self::with_policies(device, model, plan, options, None, progress)
    }

    /// The same with policies for the host to run, where not all of them have device code: see
    /// [`SparseOptions::bridge`].
    ///
    /// # Errors
    /// As [`CudaExecutor::new`], and when there are no policies although the options need some.
    pub fn with_policies(
        device: &Device,
        model: DeviceModel,
        plan: MemoryPlan,
        mut options: CudaOptions,
        policies: Option<HostPolicies>,
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
        let gemms = Gemms::open(device, GemmOptions::default())?;
        let experts = programs.experts.as_ref().map(|programs| programs.shape);
        let memory = Memory::new(device, &spec, head.as_ref(), experts, &options, &plan)?;
        let geometry = KvGeometry {
            layers: spec.layers,
            q_heads: spec.q_heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            block_tokens: BLOCK_TOKENS,
            dtype: KvDtype::Bf16,
        };
        let (mut host, mut budget_blocks, mut cap) = (None, None, 0);
        let (mut host_side, mut landing) = (None, None);
        if let Residency::Sparse(sparse) = &options.residency {
            if let Some(bridge) = sparse.bridge() {
                let policies = policies.ok_or_else(|| {
                    let problem = "expected policies for the host to run, as not all have device code; found none";
                    DeviceError::new("starting an executor", problem)
                })?;
                let sizes = (geometry, extent, plan.requests);
                host_side = Some(RefCell::new(HostSide::new(device, policies, sparse, bridge, sizes)?));
            }
            if sparse.copy_engine {
                let copies = plan.requests * geometry.kv_heads * (extent.slots + 2);
                landing = Some(list_landing(device, copies)?);
            }
            let bytes = plan.host;
            let report = |done: usize| progress(done, bytes as usize);
            host = Some(HostPool::new(device, bytes, sparse.host.alias, &report)?);
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
            workspaces,
            streams,
            events,
            marks: RefCell::new(None),
            host_side,
            list_landing: landing,
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

    /// Batch sizes that graphs are captured for: a step runs the next larger one.
    fn bucket(&self, rows: usize) -> usize {
        let step = match rows {
            0..=4 => return rows.next_power_of_two().min(self.rows.len()),
            5..=32 => 8,
            33..=128 => 16,
            _ => 32,
        };
        rows.next_multiple_of(step).min(self.rows.len())
    }

    /// Records what the device does in the steps to come. Events around every operation slow a step down a little.
    pub fn set_tracer(&mut self, tracer: Tracer) {
        self.tracer = tracer;
        self.graphs.clear();
    }

    /// Queues a step of the rows whose inputs are set and waits for it.
    fn run_batch(&mut self, rows: usize) -> Result<(), DeviceError> {
        let bucket = self.bucket(rows);
        if let Some(side) = &self.parts.host_side {
            let positions = self.parts.memory.shared.inputs().iter().map(|input| input.position);
            side.borrow_mut().begin(positions.enumerate().filter(|(_, position)| *position >= 0));
        }
        let key = (bucket, self.parts.memory.shared.filters(0, bucket));
        if self.parts.options.mode == StepMode::Graph && !self.graphs.contains_key(&key) {
            let graph = self.capture(bucket)?;
            self.graphs.insert(key, graph);
        }
        let launched = Instant::now();
        let mut marks = Vec::new();
        match self.graphs.get(&key) {
            // SAFETY: the graph uses the memory of `parts`, which outlives the launch: it is waited for below.
            Some(step) => unsafe { step.graph.launch(&self.parts.streams.foreground)? },
            None => marks = self.traced(|parts| parts.queue_step(Scope::Batch(bucket)))?.1,
        }
        self.transfers_left = self.parts.rotation() < self.parts.layers();
        self.parts.streams.foreground.synchronize()?;
        let marks = self.graphs.get(&key).map_or(&marks, |step| &step.marks);
        timeline::record(&self.tracer, marks, self.steps, launched)
    }

    /// Captures a step of `bucket` rows. A step of nothing but padding goes first: products choose their algorithms then,
    /// which a capture must not do.
    fn capture(&mut self, bucket: usize) -> Result<StepGraph, DeviceError> {
        let inputs: Vec<StepInput> = self.parts.memory.shared.inputs().to_vec();
        self.parts.memory.shared.inputs().fill(PADDING);
        self.parts.queue_step(Scope::Batch(bucket))?;
        self.parts.device.synchronize()?;
        self.parts.gemms.end_planning();
        self.parts.memory.shared.inputs().copy_from_slice(&inputs);
        let capture = |parts: &Parts| parts.streams.foreground.capture(|| parts.queue_step(Scope::Batch(bucket)));
        let (graph, marks) = self.traced(capture)?;
        Ok(StepGraph { graph, marks })
    }

    /// Runs `queue` with events around the operations where steps are traced.
    fn traced<T>(&self, queue: impl FnOnce(&Parts) -> Result<T, DeviceError>) -> Result<(T, Vec<Mark>), DeviceError> {
        *self.parts.marks.borrow_mut() = self.tracer.is_recording().then(Vec::new);
        let done = queue(&self.parts);
        let marks = self.parts.marks.borrow_mut().take().unwrap_or_default();
        Ok((done?, marks))
    }

    /// Finishes what the last step left to the next one, so that rows can be given to other requests.
    fn settle(&mut self) -> Result<(), DeviceError> {
        if std::mem::take(&mut self.transfers_left) {
            self.parts.queue_left_transfers()?;
        }
        self.parts.streams.foreground.synchronize()
    }

    fn footprint(&self, blocks: usize, prompt: usize) -> KvFootprint {
        let KvGeometry { layers, kv_heads, .. } = self.info.geometry;
        let entry = entry_bytes(self.info.geometry.head_dim);
        let plan = &self.parts.plan.request;
        let resident = match self.info.budget_blocks {
            Some(budget) => budget.min(blocks) + 2,
            None => blocks,
        };
        let share = |bytes: u64| bytes * blocks as u64 / self.parts.extent.blocks as u64;
        KvFootprint {
            working_set: (layers * kv_heads * resident * entry) as u64,
            summaries: share(plan.summaries),
            draft: share(plan.draft),
            prefill: match self.info.budget_blocks {
                Some(_) => (prompt.div_ceil(BLOCK_TOKENS) * kv_heads * entry * self.parts.plan.prefill_layers) as u64,
                None => 0,
            },
        }
    }

    /// A request's host memory.
    fn host_layers(&self, id: RequestId, request: &Request) -> Option<HostLayers> {
        let address = self.parts.host.as_ref()?.address(id)?;
        let block = self.info.geometry.block_bytes();
        Some(HostLayers { address, stride: request.blocks * block, bytes: request.prompt / BLOCK_TOKENS * block })
    }

    /// Makes a row's tables those of a new request.
    fn prepare_row(&mut self, id: RequestId, row: usize, blocks: usize) -> Result<(), DeviceError> {
        let layers = self.parts.layers();
        let block = self.info.geometry.block_bytes();
        let (rows, kv_heads, slots) = (self.rows.len(), self.info.geometry.kv_heads, self.parts.extent.slots);
        let Some(base) = self.parts.host.as_ref().and_then(|host| host.address(id)) else { return Ok(()) };
        for layer in 0..layers {
            self.parts.memory.shared.hosts()[layer * rows + row] = base.offset(layer * blocks * block).0;
        }
        if let Some(side) = &self.parts.host_side {
            side.borrow_mut().admit(row, base, blocks * block);
        }
        let stream = &self.parts.streams.foreground;
        let Some(sparse) = &self.parts.memory.sparse else { return Ok(()) };
        let from = self.parts.memory.shared.hosts_address();
        // SAFETY: both tables have `layers * rows` addresses; steps are queued on the same stream.
        unsafe { stream.copy(sparse.hosts.address(), from, layers * rows * 8)? };
        for sets in &sparse.layers {
            let at = sets.slot_block.address().offset(row * kv_heads * slots * 4);
            // SAFETY: the row's own slots; no step that uses them is queued after the one before.
            unsafe { stream.fill(at, 0xff, kv_heads * slots * 4)? };
        }
        Ok(())
    }

    fn try_admit(&mut self, sequence: Sequence) -> Result<Admission, DeviceError> {
        let Sequence { request: id, prompt, max_new_tokens, sampling } = sequence;
        if let Some(reason) = sampler::refusal(sampling, self.info.vocab) {
            return Ok(Admission::Refused { reason });
        }
        if let Some(token) = prompt.iter().find(|token| token.index() >= self.info.vocab) {
            let reason = format!("expected prompt tokens below {}, found {token}", self.info.vocab);
            return Ok(Admission::Refused { reason });
        }
        // The last generated token is never run.
        let tokens = prompt.len() + max_new_tokens.saturating_sub(1);
        if tokens > self.info.max_context {
            let reason = format!(
                "expected a context of at most {} tokens, found {tokens} (engine.max_context)",
                self.info.max_context
            );
            return Ok(Admission::Refused { reason });
        }
        let Some(row) = self.rows.iter().position(Option::is_none) else {
            return Ok(Admission::Wait { reason: format!("device memory: all {} rows are in use", self.rows.len()) });
        };
        let blocks = self.info.geometry.full_blocks(tokens);
        let bytes = (self.info.geometry.layers * blocks * self.info.geometry.block_bytes()) as u64;
        if let Some(host) = &mut self.parts.host {
            match host.reserve(id, bytes) {
                Reservation::Granted => {}
                Reservation::Full { needed, free } => {
                    return Ok(Admission::Wait {
                        reason: format!("host KV memory: {needed} bytes needed, {free} free"),
                    });
                }
                Reservation::TooLarge { needed, capacity } => {
                    return Ok(Admission::Refused {
                        reason: format!(
                            "the KV store is too small: expected room for {needed} bytes, found {capacity}\n  hint: raise \
                             store.capacity, or shorten the context"
                        ),
                    });
                }
            }
        }
        self.prepare_row(id, row, blocks)?;
        self.parts.memory.shared.set_sampling(row, sampling);
        let footprint = self.footprint(tokens.div_ceil(BLOCK_TOKENS), prompt.len());
        self.device_bytes += footprint;
        if self.device_bytes.total() > self.device_peak.total() {
            self.device_peak = self.device_bytes;
        }
        self.rows[row] = Some(id);
        let request = Request {
            row,
            prompt: prompt.len(),
            blocks,
            position: prompt.len(),
            end: tokens,
            footprint,
            phase: Phase::Prefill { prompt, queued: 0 },
        };
        self.requests.insert(id, request);
        Ok(Admission::Admitted)
    }

    fn try_prefill(&mut self, id: RequestId) -> Result<PrefillProgress, PrefillError> {
        let refuse = |problem: &str| Err(PrefillError::Request(format!("request {id}: {problem}")));
        let busy = self.requests.values().any(|r| r.phase == Phase::Decode);
        let Some(request) = self.requests.get(&id) else { return refuse("expected an admitted request, found none") };
        let Phase::Prefill { queued, prompt: tokens } = &request.phase else {
            return refuse("its prompt has been read already");
        };
        let (mut queued, layers) = (*queued, self.parts.layers());
        let other = |r: &Request| r.row != request.row && matches!(r.phase, Phase::Prefill { queued: 1.., .. });
        if self.requests.values().any(other) {
            return refuse("expected one prompt to be read at a time, found another under way");
        }
        let host = self.host_layers(id, request);
        let prompt = Prompt { row: request.row, tokens: request.prompt, host };
        if queued == 0 {
            let tokens: Vec<i32> = tokens.iter().map(|token| token.0 as i32).collect();
            self.begin_prompt(id, prompt, &tokens)?;
        }
        let mut done = self.layers_done(queued)?;
        while queued < layers && queued < done + LAYERS_AHEAD {
            self.parts.queue_prompt_layer(prompt, queued)?;
            queued += 1;
        }
        if !busy && done < queued {
            // Nothing else to do meanwhile.
            self.parts.events.prefilled[done].synchronize()?;
            done = self.layers_done(queued)?;
        }
        let request = self.requests.get_mut(&id).expect("looked up above");
        if done < layers {
            if let Phase::Prefill { queued: before, .. } = &mut request.phase {
                *before = queued;
            }
            let tokens = request.prompt;
            return Ok(PrefillProgress::Running { done: done * tokens, total: layers * tokens });
        }
        // What the host holds is complete before a step may evict it.
        self.parts.streams.offload.synchronize()?;
        self.parts.gemms.end_planning();
        let token = self.parts.memory.shared.outputs()[request.row];
        let prefill = std::mem::take(&mut request.footprint.prefill);
        self.device_bytes -= KvFootprint { prefill, ..KvFootprint::default() };
        request.phase = match self.info.budget_blocks {
            Some(_) => Phase::First,
            None => Phase::Decode,
        };
        token_of(id, token).map(PrefillProgress::Done).map_err(|error| PrefillError::Request(error.to_string()))
    }

    /// Layers of the prefill under way that are done.
    fn layers_done(&self, queued: usize) -> Result<usize, DeviceError> {
        for layer in 0..queued {
            if !self.parts.events.prefilled[layer].is_done()? {
                return Ok(layer);
            }
        }
        Ok(queued)
    }

    fn begin_prompt(&mut self, id: RequestId, prompt: Prompt, tokens: &[i32]) -> Result<(), DeviceError> {
        // A request that has not decoded yet loses its full KV on the device: it is fetched back later.
        self.staged = (self.parts.plan.prefill_layers >= self.parts.layers()).then_some(id);
        let shared = &mut self.parts.memory.shared;
        shared.prompt()[..tokens.len()].copy_from_slice(tokens);
        shared.singles()[1].position = tokens.len() as i32 - 1;
        // The row's tables are set on the foreground's stream.
        self.parts.order(&self.parts.streams.foreground, &self.parts.streams.prefill)?;
        self.parts.queue_prompt(prompt)
    }

    /// Checks a row of a step; gives its request's row on the device.
    fn check_row(&self, row: &DecodeRow, seen: &mut [bool]) -> Result<usize, RequestError> {
        let DecodeRow { request: id, token } = *row;
        let refuse = |problem: &str| Err(RequestError(format!("request {id}: {problem}")));
        let Some(request) = self.requests.get(&id) else {
            return refuse("expected an admitted request, named once in the batch; found none");
        };
        match &request.phase {
            Phase::Failed(problem) => return Err(RequestError(problem.clone())),
            Phase::Prefill { .. } => return refuse("its prompt has not been read yet"),
            Phase::First | Phase::Decode => {}
        }
        if std::mem::replace(&mut seen[request.row], true) {
            return refuse("expected an admitted request, named once in the batch; found it twice");
        }
        if request.position >= self.info.max_context {
            return refuse("the context is full");
        }
        if request.position >= request.end {
            return refuse("expected no more steps than tokens were asked for; slots and store have room for no more");
        }
        if token.index() >= self.info.vocab {
            return refuse("the token is not in the vocabulary");
        }
        Ok(request.row)
    }

    fn try_decode(&mut self, rows: &[DecodeRow]) -> Result<Vec<Result<TokenId, RequestError>>, DeviceError> {
        self.steps += 1;
        let mut seen = vec![false; self.rows.len()];
        let checked: Vec<Result<usize, RequestError>> = rows.iter().map(|row| self.check_row(row, &mut seen)).collect();
        self.parts.memory.shared.inputs().fill(PADDING);
        let mut batch = 0;
        let mut first = Vec::new();
        for (row, place) in rows.iter().zip(&checked) {
            let Ok(place) = *place else { continue };
            let request = &self.requests[&row.request];
            let input = StepInput { token: row.token.0 as i32, position: request.position as i32 };
            match request.phase {
                Phase::First => first.push((row.request, input)),
                _ => {
                    self.parts.memory.shared.inputs()[place] = input;
                    batch = batch.max(place + 1);
                }
            }
        }
        if batch > 0 {
            self.run_batch(batch)?;
        }
        for (id, input) in first {
            self.run_first(id, input)?;
        }
        let outputs = self.parts.memory.shared.outputs().to_vec();
        let failures = self.parts.host_side.as_ref().map(|side| side.borrow_mut().take_failures()).unwrap_or_default();
        let results = rows.iter().zip(checked).map(|(row, place)| {
            let place = place?;
            let request = self.requests.get_mut(&row.request).expect("checked above");
            if let Some(problem) = failures.get(&place) {
                let problem = format!("request {}: {problem}", row.request);
                request.phase = Phase::Failed(problem.clone());
                return Err(RequestError(problem));
            }
            request.position += 1;
            request.phase = Phase::Decode;
            self.tokens += 1;
            token_of(row.request, outputs[place])
        });
        Ok(results.collect())
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
    let name = &device.facts.name;
    match bridge {
        None => name.clone(),
        Some(Bridge::Selection) => format!("{name}, selection on the host"),
        Some(Bridge::Prediction) => format!("{name}, prediction and selection on the host"),
    }
}

fn token_of(id: RequestId, token: i32) -> Result<TokenId, RequestError> {
    u32::try_from(token).map(TokenId).map_err(|_| {
        RequestError(format!(
            "request {id}: logits: expected a number, found none\n  hint: the arithmetic overflowed, or the weights are damaged"
        ))
    })
}

/// Why a prefill cannot go on.
enum PrefillError {
    Request(String),
    Device(DeviceError),
}

impl From<DeviceError> for PrefillError {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

impl Executor for CudaExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn admit(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        let id = sequence.request;
        anyhow::ensure!(!self.requests.contains_key(&id), "request {id} is admitted already");
        anyhow::ensure!(!sequence.prompt.is_empty(), "request {id}: expected at least one prompt token, found none");
        Ok(self.try_admit(sequence)?)
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

    fn decode(&mut self, rows: &[DecodeRow]) -> anyhow::Result<Vec<Result<TokenId, RequestError>>> {
        let step = self.steps + 1;
        self.try_decode(rows).map_err(|error| anyhow::Error::new(error).context(format!("decode step {step}")))
    }

    fn release(&mut self, id: RequestId) {
        let Some(request) = self.requests.remove(&id) else { return };
        // On a lost device nothing is under way any more.
        let _ = self.settle();
        if !matches!(request.phase, Phase::Decode | Phase::First) {
            let _ = self.parts.streams.prefill.synchronize();
            let _ = self.parts.streams.offload.synchronize();
        }
        self.rows[request.row] = None;
        if let Some(side) = &self.parts.host_side {
            side.borrow_mut().release(request.row);
        }
        self.staged = self.staged.filter(|staged| *staged != id);
        self.parts.memory.shared.set_sampling(request.row, SamplingParams::default());
        self.device_bytes -= request.footprint;
        if let Some(host) = &mut self.parts.host {
            host.release(id);
        }
    }

    fn stats(&self) -> ExecutorStats {
        let lists = self.lists();
        let admitted: u64 = lists.iter().map(|list| list.admitted).sum();
        let KvGeometry { layers, kv_heads, head_dim, .. } = self.info.geometry;
        ExecutorStats {
            steps: self.steps,
            tokens: self.tokens,
            filled_entries: lists.iter().map(|list| list.filled).sum(),
            admitted_entries: admitted,
            link_bytes: admitted * entry_bytes(head_dim) as u64,
            deferred_entries: lists.iter().map(|list| list.deferred).sum(),
            cap_entries: self.tokens * (layers * kv_heads * self.info.cap) as u64,
            device: self.device_bytes,
            device_peak: self.device_peak,
            store: self.parts.host.as_ref().map(HostPool::usage).unwrap_or_default(),
            ..ExecutorStats::default()
        }
    }
}
