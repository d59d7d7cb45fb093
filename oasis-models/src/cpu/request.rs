//! What the executor holds for one request.

use crate::cpu::eagle3::DraftState;
use crate::cpu::prefill::Prefill;
use crate::sampling::Sampler;
use oasis_core::geometry::KvFootprint;
use oasis_core::ids::TokenId;
use oasis_core::memory::{LayerCache, Resident, StoreError};
use oasis_core::pipeline::Offload;

/// One admitted request.
pub(super) struct Request {
    pub prompt: Vec<TokenId>,
    pub max_new_tokens: usize,
    /// Blocks the whole context may fill.
    pub max_blocks: usize,
    pub sampler: Sampler,
    /// `None` once the prompt is in.
    pub prefill: Option<Prefill>,
    /// Another executor reads the prompt, and has not handed it over yet.
    pub is_expected: bool,
    /// Writes to the store under way.
    pub offloads: Vec<Offload>,
    /// Tokens whose keys and values are cached; the next one's position.
    pub position: usize,
    /// Decode steps run so far.
    pub steps: u64,
    /// One a layer; `None` while the stages have it.
    pub layers: Vec<Option<LayerCache>>,
    /// One a layer: the query of the step before, `[kv_heads][group][head_dim]`, where choices may be corrected.
    pub queries: Vec<Vec<f32>>,
    /// Slots of the layer whose attention is under way, while its summaries are with the predict stage.
    pub attending: Option<Resident>,
    /// A background stage failed for this request after its last step.
    pub failed: Option<String>,
    pub draft: Option<DraftState>,
    /// Device memory set aside for the request.
    pub footprint: KvFootprint,
    /// Logits of the last token, `[vocab]`.
    pub logits: Vec<f32>,
}

impl Request {
    /// Whether it can decode.
    pub fn has_read_prompt(&self) -> bool {
        self.prefill.is_none() && !self.is_expected
    }

    /// Position after the last that may be run: the last generated token never is.
    pub fn end(&self) -> usize {
        self.prompt.len() + self.max_new_tokens.saturating_sub(1)
    }

    /// Waits for every write to the store; the first error wins.
    pub fn finish_offloads(&mut self) -> Result<(), StoreError> {
        self.offloads.drain(..).map(Offload::wait).fold(Ok(()), Result::and)
    }
}
