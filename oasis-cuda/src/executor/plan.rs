//! Capacity: what the device memory is used for, and how many requests that leaves room for.

use super::mixture::ExpertShape;
use super::options::{CudaOptions, Residency};
use crate::gemm::Gemms;
use crate::layout::{BLOCK_TOKENS, entry_bytes, tile_bytes};
use crate::model::{dense_width, weight_bytes};
use oasis_core::geometry::{KvDtype, KvGeometry};
use oasis_models::draft::Eagle3Spec;
use oasis_models::spec::DecoderSpec;
use serde::Serialize;
use std::fmt;

/// Bytes of device memory, and what they are for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Bytes that may be used.
    pub limit: u64,
    /// Weights of the model and of its draft head.
    pub weights: u64,
    /// Working memory of a step, of a prefill and of matrix products.
    pub scratch: u64,
    /// Full KV of the layers that a prefill is in.
    pub prefill: u64,
    /// One request.
    pub request: RequestPlan,
    /// Most requests at a time that were asked for.
    pub asked: usize,
    /// Most requests at a time.
    pub requests: usize,
    /// Layers whose full KV a prefill keeps on the device.
    pub prefill_layers: usize,
    /// Bytes of host memory to be pinned: for the full KV of requests, or for what is on its way to a store.
    pub host: u64,
}

/// Bytes of one request of the longest context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RequestPlan {
    /// Slots and tail blocks of the working sets; every block in dense decoding.
    pub working_set: u64,
    /// Summaries of every block.
    pub summaries: u64,
    /// KV of the draft head.
    pub draft: u64,
    /// Scores, slot tables, transfer lists, activations.
    pub tables: u64,
}

impl RequestPlan {
    /// Sum of all parts.
    pub fn total(&self) -> u64 {
        self.working_set + self.summaries + self.draft + self.tables
    }
}

/// Shapes that follow from a model and options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    /// Blocks of the longest context, the last one perhaps partial, and one for a draft token.
    pub blocks: usize,
    /// Summary tiles of a KV head.
    pub tiles: usize,
    /// Slots of a KV head: K, or every block.
    pub slots: usize,
    /// Rows of a request in a step.
    pub queries: usize,
    /// Blocks of its own KV that the draft head keeps.
    pub draft_blocks: usize,
}

impl Extent {
    pub fn new(options: &CudaOptions) -> Self {
        let blocks = options.max_context.div_ceil(BLOCK_TOKENS) + 1;
        let (slots, queries, window) = match &options.residency {
            Residency::Dense => (blocks, 1, None),
            Residency::Sparse(sparse) => {
                let draft = sparse.source == oasis_core::policy::QuerySource::Draft;
                (sparse.budget_blocks.min(blocks), if draft { 2 } else { 1 }, sparse.draft_window)
            }
        };
        let draft_blocks = window.map_or(blocks, |window| window.min(blocks));
        Self { blocks, tiles: blocks.div_ceil(BLOCK_TOKENS), slots, queries, draft_blocks }
    }

    /// Most positions of a prompt of at most `tokens` tokens of which the draft head keeps keys and values.
    pub fn draft_tokens(&self, tokens: usize) -> usize {
        tokens.min(self.draft_blocks * BLOCK_TOKENS)
    }
}

/// Layers of a prefill that may be queued before those before them are done: enough that the device never waits for the
/// host, few enough that a cancelled prefill ends soon.
pub(super) const LAYERS_AHEAD: usize = 4;
/// Layers of a prompt that lie between device and store at a time.
pub(super) const BOUNCES: usize = LAYERS_AHEAD + 1;

/// Layers of a full KV that come back from a store at a time, in front of a first decode step.
pub(super) const RETURNS: usize = 2;

/// Pinned bytes between the device and a store: layers of a prompt both ways, entries of two layers' transfers, completed
/// blocks.
fn carried_bytes(geometry: &KvGeometry, extent: Extent, rows: usize, cap: usize) -> usize {
    let entry = entry_bytes(geometry.head_dim);
    let heads = rows * geometry.kv_heads;
    (BOUNCES + RETURNS) * extent.blocks * geometry.kv_heads * entry + heads * entry * (2 * cap.min(extent.slots) + 1)
}

/// Shape of the KV cache on a device.
pub(super) fn geometry(spec: &DecoderSpec) -> KvGeometry {
    KvGeometry {
        layers: spec.layers,
        q_heads: spec.q_heads,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        block_tokens: BLOCK_TOKENS,
        dtype: KvDtype::Bf16,
    }
}

/// Bytes that choosing algorithms for products takes for a while.
fn planning_bytes(spec: &DecoderSpec, head: Option<&Eagle3Spec>, chunk: usize, rows: usize) -> usize {
    let qkv = |q_heads: usize, kv_heads: usize, head_dim: usize| (q_heads + 2 * kv_heads) * head_dim;
    let inner = dense_width(spec);
    let heads = head.map(|head| {
        let qkv = qkv(head.q_heads, head.kv_heads, head.head_dim);
        (head.intermediate.max(2 * head.hidden), qkv.max(2 * head.intermediate))
    });
    let (x, y) = heads.unwrap_or_default();
    let x = x.max(spec.hidden).max(spec.q_heads * spec.head_dim).max(inner);
    let y = y.max(spec.hidden).max(qkv(spec.q_heads, spec.kv_heads, spec.head_dim)).max(2 * inner);
    Gemms::planning_bytes(chunk * x * 2, (chunk * y * 2).max(rows * spec.vocab * 4))
}

/// Workspaces, partial sums, graphs and what the driver keeps to itself.
const OVERHEAD: u64 = 512 << 20;

impl MemoryPlan {
    /// Divides `limit` bytes.
    pub fn new(limit: u64, spec: &DecoderSpec, head: Option<&Eagle3Spec>, options: &CudaOptions) -> Self {
        let extent = Extent::new(options);
        let Extent { blocks, tiles, slots, queries, draft_blocks } = extent;
        let head = head.filter(|_| queries == 2);
        let entry = entry_bytes(spec.head_dim);
        let heads = spec.layers * spec.kv_heads;
        let width = (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim;
        let query = spec.layers * spec.q_heads * spec.head_dim;
        let inner = dense_width(spec);
        // A shape that is refused needs no plan.
        let experts = ExpertShape::of(spec).ok().flatten();
        let expert_row = experts.map_or(0, |experts| experts.bytes(1));
        let activations =
            queries * ((4 * spec.hidden + 2 * width + query + 3 * inner) * 2 + expert_row) + spec.vocab * 4;
        let draft = head.map_or(0, |head| draft_blocks * head.kv_heads * entry_bytes(head.head_dim));
        let draft_activations = head.map_or(0, |head| head.draft_vocab * 4 + head.hidden * 32 + head.intermediate * 6);
        let request = match &options.residency {
            Residency::Dense => RequestPlan {
                working_set: (heads * blocks * entry) as u64,
                summaries: 0,
                draft: 0,
                tables: activations as u64,
            },
            Residency::Sparse(sparse) => {
                let lists = slots * (4 + 4 + 4) + (slots + 2) * 16 + tiles * BLOCK_TOKENS * 4;
                let kept = sparse.correction.map_or(0, |_| query * 2);
                let ahead = if sparse.ranks_ahead() { 2 * 2 * spec.q_heads * spec.head_dim } else { 0 };
                RequestPlan {
                    working_set: (heads * (slots + 2) * entry) as u64,
                    summaries: (heads * tiles * tile_bytes(sparse.device_summary())) as u64,
                    draft: draft as u64,
                    tables: (heads * lists + activations + draft_activations + kept + ahead) as u64,
                }
            }
        };
        let tokens = options.max_context;
        let chunk = options.chunk();
        // Residual, QKV and attention of a whole prompt; the head's input in its window; the MLP of a chunk.
        let whole = (2 * spec.hidden + width) * 2;
        let head_input = head.map_or(0, |head| (extent.draft_tokens(tokens) + chunk) * head.hidden * 2);
        let part = (2 * spec.hidden + 3 * inner.max(head.map_or(0, |h| h.hidden * 2))) * 2;
        let experts = experts.map_or(0, |experts| experts.bytes(chunk));
        let planning = planning_bytes(spec, head, chunk, options.max_batch);
        let scratch = ((tokens + chunk) * whole + head_input + chunk * part + experts + planning) as u64 + OVERHEAD;
        let weights = weight_bytes(spec, head) + (tokens * spec.head_dim * 8) as u64;
        let layer = match options.residency {
            Residency::Dense => 0,
            Residency::Sparse(_) => (blocks * spec.kv_heads * entry) as u64,
        };
        let few = options.prefill_layers.unwrap_or(4).clamp(2, spec.layers.max(2));
        let room = |layers: usize| limit.saturating_sub(weights + scratch + layers as u64 * layer) / request.total();
        let requests = |layers| room(layers).min(options.max_batch as u64) as usize;
        // As many as cost no request that was asked for.
        let most = options.prefill_layers.map_or(spec.layers, |_| few);
        let costs_none = |layers: &usize| requests(few) > 0 && requests(*layers) == requests(few);
        let prefill_layers = (few..=most).rev().find(costs_none).unwrap_or(few);
        let requests = requests(prefill_layers);
        let host = match &options.residency {
            Residency::Dense => 0,
            Residency::Sparse(sparse) if sparse.through_store => {
                carried_bytes(&geometry(spec), extent, requests, sparse.cap) as u64
            }
            Residency::Sparse(sparse) => {
                let stored = options.max_context.div_ceil(BLOCK_TOKENS) * heads * entry;
                let images = sparse.host.alias.unwrap_or(requests) as u64;
                sparse.host.capacity.min(images * (stored as u64).next_multiple_of(4096))
            }
        };
        Self {
            limit,
            weights,
            scratch,
            prefill: prefill_layers as u64 * layer,
            request,
            asked: options.max_batch,
            requests,
            prefill_layers,
            host,
        }
    }

    /// The longest context of at most `options.max_context` tokens, in whole blocks, of which one request fits.
    pub fn longest_context(
        limit: u64,
        spec: &DecoderSpec,
        head: Option<&Eagle3Spec>,
        options: &CudaOptions,
    ) -> Option<usize> {
        let fits = |blocks: &usize| {
            let options = CudaOptions { max_context: blocks * BLOCK_TOKENS, ..options.clone() };
            Self::new(limit, spec, head, &options).requests > 0
        };
        let (mut fit, mut beyond) = (0, options.max_context / BLOCK_TOKENS + 1);
        while beyond - fit > 1 {
            let middle = fit.midpoint(beyond);
            *(if fits(&middle) { &mut fit } else { &mut beyond }) = middle;
        }
        (fit > 0).then_some(fit * BLOCK_TOKENS)
    }

    /// Bytes in use with all requests running.
    pub fn used(&self) -> u64 {
        self.fixed() + self.requests as u64 * self.request.total()
    }

    /// Bytes that do not depend on the number of requests.
    pub fn fixed(&self) -> u64 {
        self.weights + self.scratch + self.prefill
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
        let Self { limit, weights, scratch, prefill, request, asked, requests, prefill_layers, host } = self;
        let mib = |bytes: u64| bytes as f64 / (1_u64 << 20) as f64;
        writeln!(f, "device memory: {:.2} GiB of {:.2} GiB", gib(self.used()), gib(*limit))?;
        writeln!(f, "  weights                 {:>8.2} GiB", gib(*weights))?;
        writeln!(f, "  scratch                 {:>8.2} GiB", gib(*scratch))?;
        writeln!(f, "  full KV of a prefill    {:>8.2} GiB, {prefill_layers} layers", gib(*prefill))?;
        let parts = format!(
            "working set {:.1}, summaries {:.1}, draft KV {:.1}, tables {:.1} MiB each",
            mib(request.working_set),
            mib(request.summaries),
            mib(request.draft),
            mib(request.tables)
        );
        let all = gib(*requests as u64 * request.total());
        writeln!(f, "  {requests:>3} of {asked} requests     {all:>8.2} GiB: {parts}")?;
        write!(f, "host memory, pinned       {:>8.2} GiB", gib(*host))
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::{GatherOptions, HostOptions, SparseOptions, StepMode};
    use super::*;
    use oasis_core::policy::QuerySource;
    use oasis_models::shapes;

    fn options(draft_window: Option<usize>) -> CudaOptions {
        let sparse = SparseOptions {
            budget_blocks: 128,
            cap: 6,
            source: QuerySource::Draft,
            correction: None,
            ranking: None,
            summarizer: None,
            summary_bytes: 512,
            selector: None,
            follows_link: false,
            gather: GatherOptions::default(),
            copy_engine: false,
            host: HostOptions { capacity: 1 << 40, alias: None },
            draft_window,
            through_store: false,
            observed: false,
        };
        CudaOptions {
            residency: Residency::Sparse(Box::new(sparse)),
            max_batch: 8,
            max_context: 20_000,
            memory_limit: None,
            prefill_chunk: 8192,
            prefill_layers: None,
            prefill_multiprocessors: None,
            mode: StepMode::Graph,
        }
    }

    #[test]
    fn a_prefill_keeps_as_many_layers_as_cost_no_request_its_place() {
        let (spec, head) = shapes::named("qwen3-8b").expect("the shape is known");
        let plan = |limit, prefill_layers| {
            let options = CudaOptions { max_batch: 32, prefill_layers, ..options(None) };
            MemoryPlan::new(limit, &spec, Some(&head), &options)
        };
        let mut kept = Vec::new();
        for limit in (24..40).flat_map(|gib| (0..4).map(move |quarter| (4 * gib + quarter) << 28)) {
            let (chosen, few) = (plan(limit, None), plan(limit, Some(4)));
            assert_eq!(chosen.requests, few.requests);
            assert!(chosen.used() <= limit);
            let layers = chosen.prefill_layers;
            assert!(layers == spec.layers || plan(limit, Some(layers + 1)).requests < few.requests);
            kept.push(layers);
        }
        assert!(kept.contains(&4) || kept.contains(&5), "{kept:?}");
        assert!(kept.contains(&spec.layers) && kept.iter().any(|layers| (8..spec.layers).contains(layers)), "{kept:?}");
    }

    #[test]
    fn the_longest_context_fits_and_the_next_does_not() {
        let (spec, head) = shapes::named("qwen3-8b").expect("the shape is known");
        let options = |max_context| CudaOptions { max_context, ..options(None) };
        let requests = |limit, tokens| MemoryPlan::new(limit, &spec, Some(&head), &options(tokens)).requests;
        for limit in [(79 << 28), 20 << 30, (81 << 28), 22 << 30] {
            let longest = MemoryPlan::longest_context(limit, &spec, Some(&head), &options(40_960));
            let tokens = longest.expect("a short one fits");
            assert!(tokens >= 1024 && tokens.is_multiple_of(BLOCK_TOKENS) && requests(limit, tokens) > 0);
            assert!(tokens == 40_960 || requests(limit, tokens + BLOCK_TOKENS) == 0, "{limit}: {tokens}");
        }
        assert_eq!(MemoryPlan::longest_context(80 << 30, &spec, Some(&head), &options(40_960)), Some(40_960));
        assert_eq!(MemoryPlan::longest_context(15 << 30, &spec, Some(&head), &options(40_960)), None);
        // What does not fit at all says so of few layers, not of all.
        assert_eq!(MemoryPlan::new(15 << 30, &spec, Some(&head), &options(40_960)).prefill_layers, 4);
    }

    #[test]
    fn a_window_of_the_draft_head_leaves_its_input_of_older_tokens_out() {
        let (spec, head) = shapes::named("qwen3-8b").expect("the shape is known");
        let plan = |window| MemoryPlan::new(80 << 30, &spec, Some(&head), &options(window));
        let (all, window) = (plan(None), plan(Some(128)));
        assert_eq!(all.scratch - window.scratch, ((20_000 - 128 * 16) * head.hidden * 2) as u64);
        // One that holds the longest context is none.
        assert_eq!(plan(Some(1250)).scratch, all.scratch);
        assert_eq!(plan(Some(usize::MAX)), all);
    }
}
