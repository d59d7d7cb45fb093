//! Device memory of an executor: everything is allocated at the start, and a request is a row of it.

use super::choices::{AheadQueries, CorrectionMemory};
use super::mixture::{ExpertMemory, ExpertShape};
use super::options::{CudaOptions, Residency};
use super::plan::{Extent, MemoryPlan};
use super::sampler::{SamplerMemory, filters};
use super::staging::Staging;
use crate::device::{Device, DeviceBuffer, DeviceError, PinnedBuffer};
use crate::kernels::{Address, Attention, CopyList, EntryCopy, StepInput};
use crate::layout::{BLOCK_TOKENS, entry_bytes, tile_bytes};
use crate::model::dense_width;
use half::bf16;
use oasis_core::sampling::SamplingParams;
use oasis_models::draft::Eagle3Spec;
use oasis_models::spec::DecoderSpec;

/// Working sets and summaries of one layer, all rows.
pub(super) struct LayerSets {
    /// `[rows][kv_heads][slots]` entries.
    pub slots: DeviceBuffer<u8>,
    /// `[rows][kv_heads][2]` entries.
    pub tail: DeviceBuffer<u8>,
    /// `[rows][kv_heads][tiles]` tiles.
    pub summaries: DeviceBuffer<u8>,
    /// i32 `[rows][kv_heads][slots]`.
    pub slot_block: DeviceBuffer<i32>,
    /// u32 `[rows][kv_heads][slots]`.
    pub last_selected: DeviceBuffer<u32>,
    /// u32 `[rows][kv_heads][slots]`.
    pub times_selected: DeviceBuffer<u32>,
    /// f32 `[rows][kv_heads][tiles * 16]`.
    pub scores: DeviceBuffer<f32>,
    /// `[rows * kv_heads * (slots + 2)]`.
    pub copies: DeviceBuffer<EntryCopy>,
}

/// What the first kernel of a step writes for all others: eight arrays of `rows + 1`.
pub(super) struct ScheduleArrays {
    data: DeviceBuffer<i32>,
    stride: usize,
}

impl ScheduleArrays {
    fn new(device: &Device, rows: usize) -> Result<Self, DeviceError> {
        let stride = (rows + 1).next_multiple_of(4);
        Ok(Self { data: device.zeros(8 * stride)?, stride })
    }

    fn array(&self, index: usize) -> Address {
        self.data.address().offset(index * self.stride * 4)
    }
    pub fn token(&self) -> Address {
        self.array(0)
    }
    pub fn position(&self) -> Address {
        self.array(1)
    }
    pub fn ranked(&self) -> Address {
        self.array(2)
    }
    pub fn entry_start(&self) -> Address {
        self.array(3)
    }
    pub fn tile_start(&self) -> Address {
        self.array(4)
    }
    pub fn blocks(&self) -> Address {
        self.array(5)
    }
    pub fn draft_position(&self) -> Address {
        self.array(6)
    }
    pub fn draft_entry_start(&self) -> Address {
        self.array(7)
    }
}

/// Activations of a decoder that runs `rows` rows at a time.
pub(super) struct Activations {
    /// Rows that there is room for.
    pub rows: usize,
    /// bf16 `[rows][hidden]`: the residual stream.
    pub residual: DeviceBuffer<bf16>,
    /// bf16 `[rows][widest norm]`.
    pub normed: DeviceBuffer<bf16>,
    /// bf16 `[rows][(q_heads + 2 * kv_heads) * head_dim]`.
    pub qkv: DeviceBuffer<bf16>,
    /// bf16 `[layers][rows][q_heads * head_dim]`.
    pub q: DeviceBuffer<bf16>,
    /// bf16 `[rows][q_heads * head_dim]`.
    pub attended: DeviceBuffer<bf16>,
    /// bf16 `[rows][2 * intermediate]`.
    pub gate_up: DeviceBuffer<bf16>,
    /// bf16 `[rows][intermediate]`.
    pub inner: DeviceBuffer<bf16>,
    /// bf16 `[rows][hidden]`: what a projection adds to the residual.
    pub added: DeviceBuffer<bf16>,
    /// f32 `[rows][vocab]`.
    pub logits: DeviceBuffer<f32>,
    /// Parts of heads that several CTAs of attention work on.
    pub partial: DeviceBuffer<u8>,
    /// u32 `[rows][kv_heads]`.
    pub arrived: DeviceBuffer<u32>,
    pub sampler: SamplerMemory,
}

/// Sizes of [`Activations`].
pub(super) struct Widths {
    pub layers: usize,
    pub rows: usize,
    pub hidden: usize,
    pub norm: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    /// Rows of logits, and logits of a row.
    pub logits: (usize, usize),
    /// Bytes of attention's partial sums.
    pub partial: usize,
}

impl Activations {
    fn new(device: &Device, w: &Widths) -> Result<Self, DeviceError> {
        let q = w.q_heads * w.head_dim;
        Ok(Self {
            rows: w.rows,
            residual: device.zeros(w.rows * w.hidden)?,
            normed: device.zeros(w.rows * w.norm)?,
            qkv: device.zeros(w.rows * (q + 2 * w.kv_heads * w.head_dim))?,
            q: device.zeros(w.layers * w.rows * q)?,
            attended: device.zeros(w.rows * q)?,
            gate_up: device.zeros(w.rows * 2 * w.intermediate)?,
            inner: device.zeros(w.rows * w.intermediate)?,
            added: device.zeros(w.rows * w.hidden)?,
            logits: device.zeros(w.logits.0 * w.logits.1)?,
            partial: device.zeros(w.partial)?,
            arrived: device.zeros(w.rows * w.kv_heads)?,
            sampler: SamplerMemory::new(device, w.rows)?,
        })
    }
}

/// Memory of the draft head.
pub(super) struct DraftMemory {
    /// `[pages][kv_heads]` entries.
    pub entries: DeviceBuffer<u8>,
    /// bf16 `[rows][3][target_hidden]`: hidden states of every row's last token.
    pub taps: DeviceBuffer<bf16>,
    /// i32 `[rows]`, ids of the draft vocabulary.
    pub tokens: DeviceBuffer<i32>,
    pub activations: Activations,
}

/// Memory of sparse decoding.
pub(super) struct SparseMemory {
    pub layers: Vec<LayerSets>,
    /// `[layers]`.
    pub lists: DeviceBuffer<CopyList>,
    /// u64 `[layers][rows]`: where each row's entries of a layer lie in host memory.
    pub hosts: DeviceBuffer<u64>,
    /// Full KV of a prompt and of the first step's request.
    pub staging: Staging,
    /// i32 `[blocks]`: 0, 1, 2, ...
    pub identity: DeviceBuffer<i32>,
    /// Schedule of a first step, whose request sees its full KV.
    pub first: ScheduleArrays,
    /// Where choices are corrected.
    pub correction: Option<CorrectionMemory>,
    /// Where a layer's blocks are ranked beside the layer before.
    pub ahead: Option<AheadQueries>,
}

impl SparseMemory {
    /// The transfer list of a layer.
    pub fn list(&self, layer: usize) -> Address {
        self.lists.address().offset(layer * size_of::<CopyList>())
    }
}

/// Most rows of a batch: what the schedule kernel takes.
pub(super) const MOST_ROWS: usize = 1024;

/// Memory that host and device share: inputs and outputs of steps, tables that the device copies when they change.
pub(super) struct Shared {
    memory: PinnedBuffer,
    rows: usize,
    layers: usize,
    tokens: usize,
}

impl Shared {
    const OUTPUTS: usize = MOST_ROWS * size_of::<StepInput>();
    const SINGLES: usize = Self::OUTPUTS + MOST_ROWS * 4;
    const TEMPERATURES: usize = Self::SINGLES + 64;
    const SEEDS: usize = Self::TEMPERATURES + MOST_ROWS * 4;
    const TOP_K: usize = Self::SEEDS + MOST_ROWS * 8;
    const TOP_P: usize = Self::TOP_K + MOST_ROWS * 4;
    const HOSTS: usize = Self::TOP_P + MOST_ROWS * 4;

    fn new(device: &Device, rows: usize, layers: usize, tokens: usize) -> Result<Self, DeviceError> {
        let memory = device.pinned(Self::HOSTS + layers * rows * 8 + tokens * 4, &|_| ())?;
        let mut shared = Self { memory, rows, layers, tokens };
        (0..rows).for_each(|row| shared.set_sampling(row, SamplingParams::default()));
        Ok(shared)
    }

    fn slice<T: bytemuck::Pod>(&mut self, at: usize, len: usize) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.memory.as_mut_slice()[at..at + len * size_of::<T>()])
    }

    fn address(&self, at: usize) -> Address {
        self.memory.address().offset(at)
    }

    /// Tokens and positions of the next step, `[rows]`.
    pub fn inputs(&mut self) -> &mut [StepInput] {
        self.slice(0, self.rows)
    }

    pub fn inputs_address(&self) -> Address {
        self.address(0)
    }

    /// Tokens that the device chose, `[rows]`.
    pub fn outputs(&mut self) -> &[i32] {
        self.slice(Self::OUTPUTS, self.rows)
    }

    pub fn outputs_address(&self) -> Address {
        self.address(Self::OUTPUTS)
    }

    /// Input of a first step, and the last position of a prefill.
    pub fn singles(&mut self) -> &mut [StepInput] {
        self.slice(Self::SINGLES, 2)
    }

    pub fn first_address(&self) -> Address {
        self.address(Self::SINGLES)
    }

    /// The position of a prefill's last token.
    pub fn prefill_position(&self) -> Address {
        self.address(Self::SINGLES + size_of::<StepInput>() + 4)
    }

    /// How a row's tokens are chosen.
    pub fn set_sampling(&mut self, row: usize, sampling: SamplingParams) {
        let rows = self.rows;
        self.slice(Self::TEMPERATURES, rows)[row] = sampling.temperature;
        self.slice(Self::SEEDS, rows)[row] = sampling.seed;
        // Rows that nothing is left out of do not wait for those where something is.
        let SamplingParams { top_k, top_p, .. } = if filters(sampling) { sampling } else { SamplingParams::default() };
        self.slice(Self::TOP_K, rows)[row] = i32::try_from(top_k).unwrap_or(i32::MAX);
        self.slice(Self::TOP_P, rows)[row] = top_p;
    }

    /// Whether some of the `rows` rows from `first` on leave tokens out.
    pub fn filters(&self, first: usize, rows: usize) -> bool {
        let memory = self.memory.as_slice();
        let row = first * 4..(first + rows) * 4;
        let (top_k, top_p) = (&memory[Self::TOP_K..][row.clone()], &memory[Self::TOP_P..][row]);
        let (top_k, top_p): (&[i32], &[f32]) = (bytemuck::cast_slice(top_k), bytemuck::cast_slice(top_p));
        top_k.iter().any(|top_k| *top_k > 0) || top_p.iter().any(|top_p| *top_p < 1.0)
    }

    pub fn temperatures_address(&self) -> Address {
        self.address(Self::TEMPERATURES)
    }

    pub fn seeds_address(&self) -> Address {
        self.address(Self::SEEDS)
    }

    pub fn top_k_address(&self) -> Address {
        self.address(Self::TOP_K)
    }

    pub fn top_p_address(&self) -> Address {
        self.address(Self::TOP_P)
    }

    /// u64 `[layers][rows]`.
    pub fn hosts(&mut self) -> &mut [u64] {
        let len = self.layers * self.rows;
        self.slice(Self::HOSTS, len)
    }

    pub fn hosts_address(&self) -> Address {
        self.address(Self::HOSTS)
    }

    /// Tokens of the prompt that is being read.
    pub fn prompt(&mut self) -> &mut [i32] {
        let (at, tokens) = (Self::HOSTS + self.layers * self.rows * 8, self.tokens);
        self.slice(at, tokens)
    }

    pub fn prompt_address(&self) -> Address {
        self.address(Self::HOSTS + self.layers * self.rows * 8)
    }
}

/// All memory but the weights.
pub(super) struct Memory {
    pub rows: usize,
    pub schedule: ScheduleArrays,
    /// u32 `[1]`: steps so far.
    pub step: DeviceBuffer<u32>,
    pub activations: Activations,
    pub sparse: Option<SparseMemory>,
    /// Dense decoding: `[pages][kv_heads]` entries of each layer.
    pub dense: Vec<DeviceBuffer<u8>>,
    /// i32 `[rows][blocks]`.
    pub page_table: DeviceBuffer<i32>,
    pub draft: Option<DraftMemory>,
    /// f32 `[rows]`, all 0: temperatures of the draft head.
    pub greedy: DeviceBuffer<f32>,
    pub shared: Shared,
    pub prefill: PrefillMemory,
    /// Of a step.
    pub experts: Option<ExpertMemory>,
}

/// Activations of a prompt.
pub(super) struct PrefillMemory {
    /// i32 `[tokens]`.
    pub prompt: DeviceBuffer<i32>,
    /// bf16 `[tokens][hidden]`.
    pub residual: DeviceBuffer<bf16>,
    /// bf16 `[tokens][(q_heads + 2 * kv_heads) * head_dim]`, wide enough for the head's too.
    pub qkv: DeviceBuffer<bf16>,
    /// bf16 `[tokens][q_heads * head_dim]`.
    pub attended: DeviceBuffer<bf16>,
    /// bf16 `[tokens of the head's window][hidden of the head]`.
    pub head_input: DeviceBuffer<bf16>,
    /// bf16 `[chunk][widest norm]`.
    pub normed: DeviceBuffer<bf16>,
    /// bf16 `[chunk][2 * intermediate]`.
    pub gate_up: DeviceBuffer<bf16>,
    /// bf16 `[chunk][intermediate]`.
    pub inner: DeviceBuffer<bf16>,
    /// f32 `[vocab]`.
    pub logits: DeviceBuffer<f32>,
    /// Of one row.
    pub sampler: SamplerMemory,
    /// Of a chunk.
    pub experts: Option<ExpertMemory>,
    /// Tokens that pass the MLP at a time.
    pub chunk: usize,
}

/// Page of every block, `[rows][blocks]`: each row has `ring` pages, whose blocks take turns.
fn page_table(rows: usize, blocks: usize, ring: usize) -> Vec<i32> {
    (0..rows).flat_map(|row| (0..blocks).map(move |block| (row * ring + block % ring) as i32)).collect()
}

impl Memory {
    pub fn new(
        device: &Device,
        spec: &DecoderSpec,
        head: Option<&Eagle3Spec>,
        experts: Option<ExpertShape>,
        options: &CudaOptions,
        plan: &MemoryPlan,
    ) -> Result<Self, DeviceError> {
        let extent = Extent::new(options);
        let rows = plan.requests;
        let group = spec.q_heads / spec.kv_heads;
        // Products may compute up to this many rows for fewer that were asked for.
        let step_rows = (rows * extent.queries).next_multiple_of(64);
        let partial = |head_dim, group, queries| {
            let shape = Attention { head_dim, group, queries, paged: false, stages: 2 };
            shape.partial_bytes(2 * device.facts.multiprocessors)
        };
        let activations = Activations::new(
            device,
            &Widths {
                layers: spec.layers,
                rows: step_rows,
                hidden: spec.hidden,
                norm: spec.hidden,
                q_heads: spec.q_heads,
                kv_heads: spec.kv_heads,
                head_dim: spec.head_dim,
                intermediate: dense_width(spec),
                logits: (rows.next_multiple_of(64), spec.vocab),
                partial: partial(spec.head_dim, group, extent.queries),
            },
        )?;
        // Of a row; a sparse one's are the draft head's, a ring.
        let ring = match options.residency {
            Residency::Dense => extent.blocks,
            Residency::Sparse(_) => extent.draft_blocks,
        };
        let pages = match options.residency {
            Residency::Sparse(_) if head.is_none() => 0,
            _ => rows * ring,
        };
        let draft = match head {
            None => None,
            Some(head) => Some(DraftMemory {
                entries: device.zeros(pages * head.kv_heads * entry_bytes(head.head_dim))?,
                taps: device.zeros(rows.next_multiple_of(64) * 3 * head.target_hidden)?,
                tokens: device.zeros(rows)?,
                activations: Activations::new(
                    device,
                    &Widths {
                        layers: 1,
                        rows: rows.next_multiple_of(64),
                        hidden: head.hidden,
                        norm: 2 * head.hidden,
                        q_heads: head.q_heads,
                        kv_heads: head.kv_heads,
                        head_dim: head.head_dim,
                        intermediate: head.intermediate,
                        logits: (rows.next_multiple_of(64), head.draft_vocab),
                        partial: partial(head.head_dim, head.q_heads / head.kv_heads, 1),
                    },
                )?,
            }),
        };
        let entry = entry_bytes(spec.head_dim);
        let mut dense = Vec::new();
        let sparse = match &options.residency {
            Residency::Dense => {
                for _ in 0..spec.layers {
                    dense.push(device.zeros(pages * spec.kv_heads * entry)?);
                }
                None
            }
            Residency::Sparse(sparse) => {
                let heads = rows * spec.kv_heads;
                let mut layers = Vec::with_capacity(spec.layers);
                for _ in 0..spec.layers {
                    layers.push(LayerSets {
                        slots: device.zeros(heads * extent.slots * entry)?,
                        tail: device.zeros(heads * 2 * entry)?,
                        summaries: device.zeros(heads * extent.tiles * tile_bytes(sparse.device_summary()))?,
                        slot_block: device.zeros(heads * extent.slots)?,
                        last_selected: device.zeros(heads * extent.slots)?,
                        times_selected: device.zeros(heads * extent.slots)?,
                        scores: device.zeros(heads * extent.tiles * BLOCK_TOKENS)?,
                        copies: device.zeros(heads * (extent.slots + 2))?,
                    });
                }
                let identity: Vec<i32> = (0..extent.blocks as i32).collect();
                let layer_bytes = extent.blocks * spec.kv_heads * entry;
                Some(SparseMemory {
                    layers,
                    lists: device.zeros(spec.layers)?,
                    hosts: device.zeros(spec.layers * rows)?,
                    staging: Staging::new(device, spec.layers, plan.prefill_layers, layer_bytes)?,
                    identity: device.upload(&identity)?,
                    first: ScheduleArrays::new(device, 1)?,
                    correction: (sparse.correction)
                        .map(|rule| {
                            CorrectionMemory::new(device, rule, spec.layers, rows, spec.q_heads * spec.head_dim)
                        })
                        .transpose()?,
                    ahead: (sparse.ranks_ahead())
                        .then(|| AheadQueries::new(device, step_rows, spec.q_heads * spec.head_dim))
                        .transpose()?,
                })
            }
        };
        Ok(Self {
            rows,
            schedule: ScheduleArrays::new(device, rows)?,
            step: device.zeros(1)?,
            activations,
            sparse,
            dense,
            page_table: device.upload(&page_table(rows, extent.blocks, ring))?,
            draft,
            greedy: device.zeros(rows)?,
            shared: Shared::new(device, rows, spec.layers, options.max_context)?,
            prefill: PrefillMemory::new(device, spec, head, experts, options)?,
            experts: experts.map(|shape| ExpertMemory::new(device, shape, spec.layers, step_rows)).transpose()?,
        })
    }
}

impl PrefillMemory {
    fn new(
        device: &Device,
        spec: &DecoderSpec,
        head: Option<&Eagle3Spec>,
        experts: Option<ExpertShape>,
        options: &CudaOptions,
    ) -> Result<Self, DeviceError> {
        let chunk = options.chunk();
        // The last chunk of a prompt is run with more rows than it has.
        let tokens = options.max_context + chunk;
        let head_tokens = Extent::new(options).draft_tokens(options.max_context) + chunk;
        let qkv = |q: usize, kv: usize, d: usize| (q + 2 * kv) * d;
        let head_hidden = head.map_or(0, |head| head.hidden);
        let inner = dense_width(spec).max(head_hidden);
        let target = qkv(spec.q_heads, spec.kv_heads, spec.head_dim);
        let widest = target.max(head.map_or(0, |head| qkv(head.q_heads, head.kv_heads, head.head_dim)));
        Ok(Self {
            prompt: device.zeros(tokens)?,
            residual: device.zeros(tokens * spec.hidden)?,
            qkv: device.zeros(tokens * widest)?,
            attended: device.zeros(tokens * spec.q_heads * spec.head_dim)?,
            head_input: device.zeros(head_tokens * head_hidden)?,
            normed: device.zeros(chunk * spec.hidden.max(2 * head_hidden))?,
            gate_up: device.zeros(chunk * 2 * inner)?,
            inner: device.zeros(chunk * inner)?,
            logits: device.zeros(spec.vocab)?,
            sampler: SamplerMemory::new(device, 1)?,
            experts: experts.map(|shape| ExpertMemory::new(device, shape, spec.layers, chunk)).transpose()?,
            chunk,
        })
    }
}
