//! What computes: a device with a model on it.

use crate::geometry::{KvFootprint, KvGeometry};
use crate::ids::{RequestId, TokenId};
use crate::memory::StoreUsage;
use crate::pipeline::PipelineMetrics;
use crate::sampling::SamplingParams;

/// Facts about an executor that do not change.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecutorInfo {
    /// Device in words, such as `cpu, 2 threads`.
    pub device: String,
    /// Shape of the KV cache.
    pub geometry: KvGeometry,
    /// Blocks per KV head that stay on the device, K; `None` when all do.
    pub budget_blocks: Option<usize>,
    /// Most admissions a KV head and step, C.
    pub cap: usize,
    /// Tokens of the vocabulary: ids below this are valid.
    pub vocab: usize,
    /// Longest context in tokens, prompt and answer together.
    pub max_context: usize,
}

/// A request as the executor sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// Request.
    pub request: RequestId,
    /// Prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// Most tokens to be generated.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
}

/// Answer to an admission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// Memory is set aside on the device and in the store.
    Admitted,
    /// Not while others run: the request waits.
    Wait {
        /// What there is too little of.
        reason: String,
    },
    /// Never: the request is larger than the whole device or store, or its sampling parameters are impossible.
    Refused {
        /// What there is too little of, or which parameter is out of range, with the numbers.
        reason: String,
    },
}

/// A request that the device or the store is too small for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TooSmall(pub String);

/// How far a prefill has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefillProgress {
    /// More to do.
    Running {
        /// Token-layers done.
        done: usize,
        /// Token-layers in all.
        total: usize,
    },
    /// The prompt is in; this is the first generated token.
    Done(TokenId),
}

/// One request's input of a decode step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeRow {
    /// Request.
    pub request: RequestId,
    /// Token to run: usually the one returned last, but the caller may force another.
    pub token: TokenId,
}

/// Why one request cannot go on. The others of its batch can.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct RequestError(pub String);

/// What an executor has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ExecutorStats {
    /// Decode steps, each of the whole batch.
    pub steps: u64,
    /// Tokens decoded, over all requests.
    pub tokens: u64,
    /// Entries (one block, one KV head) of first working sets that crossed the link.
    pub filled_entries: u64,
    /// Entries that selectors admitted and that crossed the link.
    pub admitted_entries: u64,
    /// Bytes of the admitted entries.
    pub link_bytes: u64,
    /// Wanted entries that the cap left outside.
    pub deferred_entries: u64,
    /// Entries the cap would have let in.
    pub cap_entries: u64,
    /// Device memory held now.
    pub device: KvFootprint,
    /// Most device memory ever held.
    pub device_peak: KvFootprint,
    /// Store.
    pub store: StoreUsage,
    /// Background stages; `None` where there are none, or where a device runs them unwatched.
    pub pipeline: Option<PipelineMetrics>,
}

/// Runs prefill and decode steps for the engine.
///
/// Obligations:
/// - A request's tokens depend on nothing but its own prompt and sampling: not on the batch it runs in.
/// - An error of one request leaves the others untouched; `Err` of a whole call means that the device is lost.
/// - `release` is legal in every state and leaves no memory, no store block and no task behind.
pub trait Executor: Send {
    /// Facts that do not change.
    fn info(&self) -> &ExecutorInfo;

    /// Sets memory aside for a request and takes its prompt.
    ///
    /// # Errors
    /// When the device is lost.
    fn admit(&mut self, sequence: Sequence) -> anyhow::Result<Admission>;

    /// Advances the prefill of one request by one chunk of one layer.
    ///
    /// # Errors
    /// When the request cannot go on; it must then be released.
    fn prefill(&mut self, request: RequestId) -> Result<PrefillProgress, RequestError>;

    /// Prompts that may be read at the same time, in turn. One, where reading keeps the device busy anyway.
    fn prompts_at_once(&self) -> usize {
        1
    }

    /// Whether a request's first decode step is one of its own anyway. It is then run as soon as the prompt has been read, and
    /// the next prompt begins before the others decode.
    fn begins_alone(&self) -> bool {
        false
    }

    /// Runs one decode step; gives the next token of each row, in order.
    ///
    /// # Errors
    /// The outer one when the device is lost; an inner one when that request cannot go on.
    fn decode(&mut self, rows: &[DecodeRow]) -> anyhow::Result<Vec<Result<TokenId, RequestError>>>;

    /// Gives back everything of a request.
    fn release(&mut self, request: RequestId);

    /// What has been done so far.
    fn stats(&self) -> ExecutorStats;
}

/// An executor whose logits can be looked at.
pub trait Logits: Executor {
    /// Logits behind a request's last token, `[vocab]`; no other request may have run since.
    ///
    /// # Errors
    /// When there is no such request, or the device is lost.
    fn last_logits(&self, request: RequestId) -> anyhow::Result<Vec<f32>>;
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn info(&self) -> &ExecutorInfo {
        (**self).info()
    }

    fn admit(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        (**self).admit(sequence)
    }

    fn prefill(&mut self, request: RequestId) -> Result<PrefillProgress, RequestError> {
        (**self).prefill(request)
    }

    fn prompts_at_once(&self) -> usize {
        (**self).prompts_at_once()
    }

    fn begins_alone(&self) -> bool {
        (**self).begins_alone()
    }

    fn decode(&mut self, rows: &[DecodeRow]) -> anyhow::Result<Vec<Result<TokenId, RequestError>>> {
        (**self).decode(rows)
    }

    fn release(&mut self, request: RequestId) {
        (**self).release(request);
    }

    fn stats(&self) -> ExecutorStats {
        (**self).stats()
    }
}
