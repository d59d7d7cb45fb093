//! What an executor consists of, and the operations that steps and prefills share.

use super::host::HostPool;
use super::host_side::HostSide;
use super::link::LinkFollower;
use super::memory::{Memory, SparseMemory};
use super::options::CudaOptions;
use super::plan::{Extent, MemoryPlan};
use super::programs::{DraftPrograms, Programs, SparsePrograms};
use super::store_link::StoreLink;
use super::timeline::Mark;
use crate::device::{Device, DeviceError, Event, PinnedBuffer, Priority, Stream};
use crate::gemm::{GemmShape, Gemms, Operands, Output, Workspace};
use crate::kernels::{AddNormParams, Address};
use crate::model::{DeviceAttention, DeviceHead, DeviceMatrix, DeviceModel, DeviceVector};
use oasis_core::ids::RequestId;
use oasis_core::memory::StoreUsage;
use oasis_core::pipeline::Track;
use std::cell::{Cell, RefCell};
use std::ops::Range;

/// The streams; one for each of those who work at the same time.
pub(super) struct Streams {
    /// Decoding of tokens.
    pub foreground: Stream,
    /// Scans of summaries, and selections.
    pub predict: Stream,
    /// Gathers over the link.
    pub transfer: Stream,
    /// Prefills while nothing decodes.
    pub prefill: Stream,
    /// Copies of a prefill's KV to the host, and back for a first step.
    pub offload: Stream,
}

/// Points that streams wait for.
pub(super) struct Events {
    /// Used again and again: a wait takes the state that the event has when it is queued.
    pub order: Event,
    /// One a layer: its transfer of the step before is done.
    pub transferred: Vec<Event>,
    /// One a layer: a prefill has its KV on the device.
    pub appended: Vec<Event>,
    /// One a layer: its KV has been copied between device and host.
    pub copied: Vec<Event>,
    /// One a layer: a prefill is through.
    pub prefilled: Vec<Event>,
}

/// A stream, what makes its matrix products, and their workspace.
pub(super) struct Work<'a> {
    pub stream: &'a Stream,
    pub gemms: &'a Gemms,
    /// What will make them too, and plans them at the same time: now the device is idle.
    pub gemms_later: Option<&'a Gemms>,
    pub workspace: &'a Workspace,
}

/// Where prefills run while others decode: kernels of a prefill are long, and those of a step would wait for each.
pub(super) struct BesideDecode {
    /// On a part of the multiprocessors.
    stream: Stream,
    /// Planned for that part.
    gemms: Gemms,
    /// Whether what is queued next goes there.
    chosen: Cell<bool>,
}

impl BesideDecode {
    pub fn new(device: &Device, gemms: &Gemms, multiprocessors: u32) -> Result<Self, DeviceError> {
        let part = device.partition(multiprocessors)?;
        let stream = part.stream(Priority::Low)?;
        Ok(Self { stream, gemms: gemms.on(part)?, chosen: Cell::new(false) })
    }
}

pub(super) struct Parts {
    pub device: Device,
    pub model: DeviceModel,
    pub options: CudaOptions,
    pub extent: Extent,
    pub plan: MemoryPlan,
    pub memory: Memory,
    /// The full KV of requests; `None` in dense decoding.
    pub host: Option<HostPool>,
    pub programs: Programs,
    pub gemms: Gemms,
    /// `None` gives prefills all multiprocessors, always.
    pub beside_decode: Option<BesideDecode>,
    pub workspaces: [Workspace; 2],
    pub streams: Streams,
    pub events: Events,
    /// Events around the operations that are queued, where steps are traced.
    pub marks: RefCell<Option<Vec<Mark>>>,
    /// What runs policies without device code.
    pub host_side: Option<RefCell<HostSide>>,
    /// What sets the cap of selections on the device, where it follows the link.
    pub link_follower: Option<RefCell<LinkFollower>>,
    /// What brings entries from a store that the device does not address.
    pub store_link: Option<RefCell<StoreLink>>,
    /// Where lists of copies are read back to, for the copy engine.
    pub list_landing: Option<PinnedBuffer>,
}

impl Parts {
    /// Where a layer's kernels write their times; none where the cap does not follow the link.
    pub fn stamps(&self, layer: usize) -> Address {
        self.link_follower.as_ref().map_or(Address::NONE, |link| link.borrow().stamps(layer))
    }

    pub fn layers(&self) -> usize {
        self.model.spec.layers
    }

    pub fn foreground(&self) -> Work<'_> {
        Work { stream: &self.streams.foreground, gemms: &self.gemms, gemms_later: None, workspace: &self.workspaces[0] }
    }

    pub fn prefill(&self) -> Work<'_> {
        let (stream, gemms, gemms_later) = match &self.beside_decode {
            Some(beside) if beside.chosen.get() => (&beside.stream, &beside.gemms, None),
            beside => (&self.streams.prefill, &self.gemms, beside.as_ref().map(|beside| &beside.gemms)),
        };
        Work { stream, gemms, gemms_later, workspace: &self.workspaces[1] }
    }

    /// Says whether others decode while what is queued next of a prefill runs.
    pub fn share_with_decode(&self, others_decode: bool) -> Result<(), DeviceError> {
        let Some(beside) = &self.beside_decode else { return Ok(()) };
        if beside.chosen.replace(others_decode) == others_decode {
            return Ok(());
        }
        match others_decode {
            true => self.order(&self.streams.prefill, &beside.stream),
            false => self.order(&beside.stream, &self.streams.prefill),
        }
    }

    /// Gives back the memory that planning products used.
    pub fn end_planning(&self) {
        self.gemms.end_planning();
        if let Some(beside) = &self.beside_decode {
            beside.gemms.end_planning();
        }
    }

    pub fn sparse(&self) -> Option<(&SparseMemory, &SparsePrograms)> {
        self.memory.sparse.as_ref().zip(self.programs.sparse.as_ref())
    }

    /// Where a request's full KV lies, or seems to lie.
    pub fn full_kv(&self, request: RequestId) -> Option<Address> {
        match &self.store_link {
            Some(link) => link.borrow().address(request),
            None => self.host.as_ref()?.address(request),
        }
    }

    /// How full the memory or the store of the full KV is.
    pub fn store_usage(&self) -> StoreUsage {
        match &self.store_link {
            Some(link) => link.borrow().usage(),
            None => self.host.as_ref().map(HostPool::usage).unwrap_or_default(),
        }
    }

    /// Parts of `bytes` bytes of host memory at `address` that a copy engine takes one at a time: offset and length.
    pub fn host_parts(&self, address: Address, bytes: usize) -> Vec<(usize, usize)> {
        self.host.as_ref().map_or_else(Vec::new, |host| host.copies(address, bytes).collect())
    }

    /// Lets what `after` is given next wait for what `before` has been given so far.
    pub fn order(&self, before: &Stream, after: &Stream) -> Result<(), DeviceError> {
        before.record(&self.events.order)?;
        after.wait(&self.events.order)
    }

    /// Queues `work` on `stream`, between two events where steps are traced.
    pub fn span(
        &self,
        stream: &Stream,
        track: Track,
        name: &'static str,
        layer: usize,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        if self.marks.borrow().is_none() {
            return work();
        }
        let (start, end) = (self.device.event()?, self.device.event()?);
        stream.record_in_graph(&start)?;
        work()?;
        stream.record_in_graph(&end)?;
        if let Some(marks) = self.marks.borrow_mut().as_mut() {
            marks.push(Mark { track, name, layer, start, end });
        }
        Ok(())
    }

    /// `y[rows][out] = x[rows][in] . matrix`; `rows` is how many there are, and for how many both sides have room.
    pub fn linear(
        &self,
        work: &Work<'_>,
        rows: (usize, usize),
        matrix: &DeviceMatrix,
        x: Address,
        y: Address,
        output: Output,
    ) -> Result<(), DeviceError> {
        self.product(work, GemmShape { output, ..shape(rows, matrix) }, matrix.address(), x, y, Address::NONE)
    }

    /// The same with an optional bias.
    pub fn linear_with_bias(
        &self,
        work: &Work<'_>,
        rows: (usize, usize),
        matrix: &DeviceMatrix,
        bias: Option<&DeviceVector>,
        x: Address,
        y: Address,
    ) -> Result<(), DeviceError> {
        let shape = GemmShape { bias: bias.is_some(), ..shape(rows, matrix) };
        self.product(work, shape, matrix.address(), x, y, bias.map_or(Address::NONE, |bias| bias.address()))
    }

    /// The part of a QKV product that gives `heads`, counted over query, key and value heads. `y` is where the rows of all
    /// heads begin; the others are left alone.
    #[allow(clippy::too_many_arguments)]
    pub fn project_heads(
        &self,
        work: &Work<'_>,
        rows: usize,
        attention: &DeviceAttention,
        head_dim: usize,
        heads: Range<usize>,
        x: Address,
        y: Address,
    ) -> Result<(), DeviceError> {
        let (qkv, bias) = (&attention.qkv, &attention.qkv_bias);
        let (first, out) = (heads.start * head_dim, heads.len() * head_dim);
        let shape = GemmShape { bias: bias.is_some(), y_stride: qkv.rows, ..GemmShape::dense(rows, out, qkv.cols) };
        let w = qkv.address().offset(first * qkv.cols * 2);
        let bias = bias.as_ref().map_or(Address::NONE, |bias| bias.address().offset(first * 2));
        self.product(work, shape, w, x, y.offset(first * 2), bias)
    }

    /// Logits of rows that lie `x_stride` elements apart.
    pub fn linear_strided(
        &self,
        work: &Work<'_>,
        rows: (usize, usize),
        matrix: &DeviceMatrix,
        x: Address,
        y: Address,
        x_stride: usize,
    ) -> Result<(), DeviceError> {
        let shape = GemmShape { output: Output::F32, x_stride, ..shape(rows, matrix) };
        self.product(work, shape, matrix.address(), x, y, Address::NONE)
    }

    /// Adds the product to `y`.
    pub fn linear_onto(
        &self,
        work: &Work<'_>,
        rows: (usize, usize),
        matrix: &DeviceMatrix,
        x: Address,
        y: Address,
    ) -> Result<(), DeviceError> {
        let shape = GemmShape { accumulate: true, ..shape(rows, matrix) };
        self.product(work, shape, matrix.address(), x, y, Address::NONE)
    }

    /// A product of any shape, planned on its first use.
    pub fn product(
        &self,
        work: &Work<'_>,
        shape: GemmShape,
        w: Address,
        x: Address,
        y: Address,
        bias: Address,
    ) -> Result<(), DeviceError> {
        // SAFETY: callers give activations with room for `shape.room` rows and weights of the shape, which nothing writes;
        // each stream has its own workspace and activations.
        unsafe {
            let plan = work.gemms.plan_with(&shape, w)?;
            if let Some(later) = work.gemms_later {
                later.plan_with(&shape, w)?;
            }
            work.gemms.run(&plan, work.stream, work.workspace, &Operands { x, w, y, bias })
        }
    }

    /// Norms of the embedding and of the residual, side by side in rows of `2 * hidden`: what the head's attention takes.
    #[allow(clippy::too_many_arguments)]
    pub fn join_halves(
        &self,
        work: &Work<'_>,
        programs: &DraftPrograms,
        rows: usize,
        embedded: Address,
        residual: Address,
        out: Address,
        head: &DeviceHead,
    ) -> Result<(), DeviceError> {
        let hidden = head.spec.hidden;
        for (x, weight, offset) in [(embedded, &head.input_norm, 0), (residual, &head.hidden_norm, hidden * 2)] {
            let params = AddNormParams {
                residual: x,
                x: Address::NONE,
                weight: weight.address(),
                out: out.offset(offset),
                hidden: hidden as i32,
                out_stride: 2 * hidden as i32,
                eps: head.spec.norm_eps,
            };
            // SAFETY: callers give activations with room for `rows` rows of each kind.
            unsafe { programs.layer.norm.launch(work.stream, (rows as u32, 1), &params)? };
        }
        Ok(())
    }
}

/// Dense rows times a whole matrix.
fn shape((rows, room): (usize, usize), matrix: &DeviceMatrix) -> GemmShape {
    GemmShape { room, ..GemmShape::dense(rows, matrix.rows, matrix.cols) }
}
