//! The kernels of an executor, compiled for its model and policies.

use super::mixture::{ExpertPrograms, ExpertShape};
use super::options::{CudaOptions, Residency};
use super::plan::Extent;
use crate::compile::Compiler;
use crate::device::{Device, DeviceError, Kernel};
use crate::kernels::{
    Activation, AddNorm, Append, AppendPrompt, Attention, Correct, Embed, Filter, Gather, HashScores, PrefillAttention,
    Sample, Scan, Schedule, Select, Taps,
};
use oasis_core::policy::{Aggregate, DeviceCode, QuerySource};
use oasis_models::draft::Eagle3Spec;
use oasis_models::spec::DecoderSpec;

/// Kernels of a decoder's layers: the target's, or the draft head's.
pub(super) struct LayerPrograms {
    pub norm: Kernel<AddNorm>,
    pub append: Kernel<Append>,
    pub append_shape: Append,
    pub attention: Kernel<Attention>,
    pub attention_shape: Attention,
    pub append_prompt: Kernel<AppendPrompt>,
}

/// Kernels of sparse decoding.
pub(super) struct SparsePrograms {
    /// `None` where there is nothing to score, or where the host ranks.
    pub scan: Option<Kernel<Scan>>,
    /// Where scores are a hash.
    pub hash: Option<Kernel<HashScores>>,
    /// `None` where the host selects.
    pub select: Option<Kernel<Select>>,
    pub gather: Kernel<Gather>,
    /// Where choices are corrected.
    pub correct: Option<Kernel<Correct>>,
    /// Attention over the full KV, for first steps.
    pub full: Kernel<Attention>,
}

/// Kernels of the draft head.
pub(super) struct DraftPrograms {
    pub layer: LayerPrograms,
    pub embed: Kernel<Embed>,
}

/// All of them.
pub(super) struct Programs {
    pub schedule: Kernel<Schedule>,
    pub embed: Kernel<Embed>,
    pub embed_prompt: Kernel<Embed>,
    pub taps: Kernel<Taps>,
    pub activation: Kernel<Activation>,
    pub filter: Kernel<Filter>,
    pub sample: Kernel<Sample>,
    pub experts: Option<ExpertPrograms>,
    pub layer: LayerPrograms,
    pub prefill_attention: Kernel<PrefillAttention>,
    pub prefill_attention_shape: PrefillAttention,
    pub sparse: Option<SparsePrograms>,
    pub draft: Option<DraftPrograms>,
}

impl Programs {
    pub fn load(
        device: &Device,
        compiler: &Compiler,
        spec: &DecoderSpec,
        head: Option<&Eagle3Spec>,
        options: &CudaOptions,
    ) -> Result<Self, DeviceError> {
        let Extent { blocks, queries, slots, .. } = Extent::new(options);
        let load = Loader { device, compiler };
        let (head_dim, group) = (spec.head_dim, spec.q_heads / spec.kv_heads);
        // Where nothing is summarised the code of any summarizer will do.
        let none = (NO_SUMMARIES, 2 * head_dim);
        let (summarizer, bytes) = match &options.residency {
            Residency::Sparse(sparse) => {
                sparse.scoring().map_or(none, |(summarizer, _)| (summarizer, sparse.summary_bytes))
            }
            Residency::Dense => none,
        };
        let paged = options.residency == Residency::Dense;
        let layer = load.layer(spec.hidden, head_dim, group, queries, paged, (summarizer, bytes))?;
        let sparse = match &options.residency {
            Residency::Dense => None,
            Residency::Sparse(sparse) => {
                let query = usize::from(sparse.source == QuerySource::Draft);
                let scan = sparse.scoring().map(|(summarizer, aggregate)| {
                    let max = aggregate == Aggregate::Max;
                    Scan { head_dim, group, queries, query, max, stages: Scan::stages(bytes), summarizer, bytes }
                });
                let hash = sparse.hash().map(|_| HashScores { head_dim, group, queries, query });
                let too_long = || {
                    DeviceError::new(
                        format!("preparing selection over {blocks} blocks"),
                        "expected a context of at most 16,384 blocks (262,144 tokens)",
                    )
                    .hint("lower device.max_context")
                };
                let select = match (sparse.bridge(), sparse.selector) {
                    (None, Some(code)) => {
                        let shape = Select::for_blocks(head_dim, slots, blocks, code).ok_or_else(too_long)?;
                        Some(Select { follows_link: sparse.follows_link, ..shape })
                    }
                    _ => None,
                };
                let timed = select.is_some_and(|select| select.follows_link);
                let correct = sparse.correction.map(|_| Correct { head_dim, group });
                let super::options::GatherOptions { stages, stores, .. } = sparse.gather;
                Some(SparsePrograms {
                    scan: scan.map(|scan| device.load(compiler, &scan)).transpose()?,
                    hash: hash.map(|hash| device.load(compiler, &hash)).transpose()?,
                    select: select.map(|select| device.load(compiler, &select)).transpose()?,
                    gather: device.load(compiler, &Gather { head_dim, stages, stores, timed })?,
                    correct: correct.map(|correct| device.load(compiler, &correct)).transpose()?,
                    full: device.load(compiler, &Attention { head_dim, group, queries, paged: true, stages: 2 })?,
                })
            }
        };
        let draft = match head {
            None => None,
            Some(head) => Some(DraftPrograms {
                layer: load.layer(
                    head.hidden,
                    head.head_dim,
                    head.q_heads / head.kv_heads,
                    1,
                    true,
                    (NO_SUMMARIES, 2 * head.head_dim),
                )?,
                embed: device.load(compiler, &Embed { queries: 1 })?,
            }),
        };
        let experts = ExpertShape::of(spec)?;
        let prefill_attention_shape = PrefillAttention { head_dim };
        Ok(Self {
            schedule: device.load(compiler, &Schedule { queries })?,
            embed: device.load(compiler, &Embed { queries })?,
            embed_prompt: device.load(compiler, &Embed { queries: 1 })?,
            taps: device.load(compiler, &Taps { queries })?,
            activation: device.load(compiler, &Activation)?,
            filter: device.load(compiler, &Filter)?,
            sample: device.load(compiler, &Sample)?,
            experts: experts.map(|shape| ExpertPrograms::load(device, compiler, shape)).transpose()?,
            layer,
            prefill_attention: device.load(compiler, &prefill_attention_shape)?,
            prefill_attention_shape,
            sparse,
            draft,
        })
    }
}

const NO_SUMMARIES: DeviceCode = DeviceCode::new(
    "no_summaries.cuh",
    "struct Summarizer {\n    static constexpr int kRows = 1;\n    static __device__ float init(int) { return 0.0f; }\n    static __device__ float update(int, float value, float) { return value; }\n    static __device__ float finish(int, float value, int) { return value; }\n};\n",
);

struct Loader<'a> {
    device: &'a Device,
    compiler: &'a Compiler,
}

impl Loader<'_> {
    fn layer(
        &self,
        hidden: usize,
        head_dim: usize,
        group: usize,
        queries: usize,
        paged: bool,
        (summarizer, bytes): (DeviceCode, usize),
    ) -> Result<LayerPrograms, DeviceError> {
        let append_shape = Append { head_dim, queries, summarizer, bytes };
        let attention_shape = Attention { head_dim, group, queries, paged, stages: 2 };
        Ok(LayerPrograms {
            norm: self.device.load(self.compiler, &AddNorm { hidden })?,
            append: self.device.load(self.compiler, &append_shape)?,
            append_shape,
            attention: self.device.load(self.compiler, &attention_shape)?,
            attention_shape,
            append_prompt: self.device.load(self.compiler, &AppendPrompt { head_dim, summarizer, bytes })?,
        })
    }
}
