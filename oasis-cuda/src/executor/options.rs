//! What an executor is made of.

use crate::compile::SourceFile;
use crate::layout::BLOCK_TOKENS;
use oasis_core::policy::{Aggregate, QuerySource};

/// How much of the KV cache stays on the device.
#[derive(Debug, Clone, PartialEq)]
pub enum Residency {
    /// All of it, in pages: dense decoding.
    Dense,
    /// A working set a KV head; the rest is in host memory.
    Sparse(SparseOptions),
}

/// The policies of sparse decoding, as far as the device runs them itself.
#[derive(Debug, Clone, PartialEq)]
pub struct SparseOptions {
    /// Blocks per KV head on the device, K.
    pub budget_blocks: usize,
    /// Most admissions a KV head and step, C.
    pub cap: usize,
    /// Whose query blocks are ranked by.
    pub source: QuerySource,
    /// How the scores of a group become one.
    pub aggregate: Aggregate,
    /// Device code of the summarizer.
    pub summarizer: SourceFile,
    /// Its rows per block.
    pub summary_rows: usize,
    /// Device code of the selector.
    pub selector: SourceFile,
    /// How admitted blocks cross the link.
    pub gather: GatherOptions,
    /// Host memory for the full KV of requests.
    pub host: HostOptions,
}

/// How the gather runs: few CTAs that leave the multiprocessors to the foreground.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherOptions {
    /// CTAs.
    pub ctas: u32,
    /// Entries of a CTA's ring.
    pub stages: usize,
    /// Of them, those that may still be on their way to the slots.
    pub stores: usize,
}

impl Default for GatherOptions {
    /// Within 1% of the fastest in steps of 64 requests of Qwen3-8B's shape, on an H200 with PCIe 5 x16: 47.0 GB/s; 3 CTAs
    /// reach 44.8, 8 reach 47.3.
    fn default() -> Self {
        Self { ctas: 5, stages: 16, stores: 8 }
    }
}

/// Host memory for the full KV of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostOptions {
    /// Most bytes to be pinned.
    pub capacity: u64,
    /// Requests share this many images: the same reads and writes with less host memory. What they decode is meaningless
    /// then: for measurements only. `None` gives every request its own.
    pub alias: Option<usize>,
}

/// How a step reaches the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepMode {
    /// Captured once a batch size, launched as one graph.
    #[default]
    Graph,
    /// Queued kernel by kernel on the same streams.
    Streams,
}

/// Sizes and choices of an executor.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaOptions {
    /// Dense or sparse.
    pub residency: Residency,
    /// Most requests at a time; fewer where the memory ends before.
    pub max_batch: usize,
    /// Longest context in tokens, prompt and answer together.
    pub max_context: usize,
    /// Most bytes of device memory to be used; `None` takes what is free.
    pub memory_limit: Option<u64>,
    /// Prompt tokens that pass the MLP at a time.
    pub prefill_chunk: usize,
    /// Layers whose full KV may be on the device during a prefill; `None` takes all where there is room for them, so that
    /// the first decode step need not fetch them back.
    pub prefill_layers: Option<usize>,
    /// How steps reach the device.
    pub mode: StepMode,
}

impl CudaOptions {
    /// Prompt tokens that pass the MLP at a time: a power of two, and whole blocks.
    pub(super) fn chunk(&self) -> usize {
        self.prefill_chunk.next_power_of_two().min(self.max_context.next_power_of_two()).max(BLOCK_TOKENS)
    }
}
