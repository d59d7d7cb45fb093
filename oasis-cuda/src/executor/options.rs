//! What an executor is made of.

use crate::layout::BLOCK_TOKENS;
use oasis_core::policy::{Aggregate, Correction, DeviceCode, HashSeed, QuerySource, ScoreRanking, ScoreSource};

/// How much of the KV cache stays on the device.
#[derive(Debug, Clone, PartialEq)]
pub enum Residency {
    /// All of it, in pages: dense decoding.
    Dense,
    /// A working set a KV head; the rest is in host memory.
    Sparse(Box<SparseOptions>),
}

/// The policies of sparse decoding, as far as the device runs them itself. What it does not, [`HostPolicies`] do.
///
/// [`HostPolicies`]: super::HostPolicies
#[derive(Debug, Clone, PartialEq)]
pub struct SparseOptions {
    /// Blocks per KV head on the device, K.
    pub budget_blocks: usize,
    /// Most admissions a KV head and step, C.
    pub cap: usize,
    /// Whose query blocks are ranked by.
    pub source: QuerySource,
    /// When a choice is made again by the query that is about to attend.
    pub correction: Option<Correction>,
    /// How blocks are ranked; `None` for a predictor that does not rank by score, which the host runs.
    pub ranking: Option<ScoreRanking>,
    /// Device code of the summarizer; `None` for one that the host runs.
    pub summarizer: Option<DeviceCode>,
    /// Bytes of a block's summary on the device.
    pub summary_bytes: usize,
    /// Device code of the selector; `None` for one that the host runs.
    pub selector: Option<DeviceCode>,
    /// The selector's cap follows the link ([`Selector::cap_by_link`](oasis_core::policy::Selector::cap_by_link)): the
    /// selector itself is among the [`HostParts`](super::HostParts), and says each step's cap.
    pub follows_link: bool,
    /// How admitted blocks cross the link.
    pub gather: GatherOptions,
    /// Copies are queued one by one by the host, for the copy engine, instead of carried out by the gather.
    pub copy_engine: bool,
    /// Host memory for the full KV of requests.
    pub host: HostOptions,
    /// Newest blocks of its own KV that the draft head keeps and attends to; `None`: all.
    pub draft_window: Option<usize>,
    /// The full KV lies in a store that the device does not address: the host carries entries both ways.
    pub through_store: bool,
    /// Every policy runs on the host, where an observer sees what it sees:
    /// [`CudaExecutor::set_observer`](super::CudaExecutor::set_observer).
    pub observed: bool,
}

/// What the host does in every layer of a step, and waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bridge {
    /// Selection: the device scores blocks, the host ranks them and plans.
    Selection,
    /// Summaries and ranking as well: the device gives keys and queries.
    Prediction,
}

impl SparseOptions {
    /// What the host must do, as not all policies have device code.
    pub fn bridge(&self) -> Option<Bridge> {
        let ranks = self.scoring().is_some() || self.hash().is_some() || self.keeps_only();
        match (ranks && !self.observed, self.selector) {
            (false, _) => Some(Bridge::Prediction),
            (true, None) => Some(Bridge::Selection),
            // Where the host carries entries, the host knows how fast.
            (true, Some(_)) if self.follows_link && (self.copy_engine || self.through_store) => Some(Bridge::Selection),
            (true, Some(_)) => None,
        }
    }

    /// Whether the device must run all policies, as choices are made again or a layer ahead.
    pub fn needs_device(&self) -> bool {
        self.correction.is_some() || self.ranks_ahead()
    }

    /// Whether a layer's blocks are ranked beside the layer before.
    pub fn ranks_ahead(&self) -> bool {
        self.source == QuerySource::PreviousLayer
    }

    /// Whether blocks that are wanted whatever their score leave no room for others: there are no summaries then, and every
    /// score stays 0.
    fn keeps_only(&self) -> bool {
        self.ranking.is_some_and(|ranking| ranking.kept.fill(self.budget_blocks))
    }

    /// Where the device's scores come from, if they are needed.
    fn scores(&self) -> Option<ScoreSource> {
        self.ranking.filter(|_| !self.observed && !self.keeps_only()).map(|ranking| ranking.scores)
    }

    /// Device code of the summarizer and how scores are joined, where the device scores blocks by their summaries.
    pub fn scoring(&self) -> Option<(DeviceCode, Aggregate)> {
        match self.scores()? {
            ScoreSource::Summaries(aggregate) => Some((self.summarizer?, aggregate)),
            ScoreSource::Hash(_) => None,
        }
    }

    /// Seed of scores that are a hash.
    pub fn hash(&self) -> Option<HashSeed> {
        match self.scores()? {
            ScoreSource::Summaries(_) => None,
            ScoreSource::Hash(seed) => Some(seed),
        }
    }

    /// Bytes of a block's summary, where the device keeps any.
    pub fn device_summary(&self) -> usize {
        self.scoring().map_or(0, |_| self.summary_bytes)
    }

    /// Whether the host takes part in a step: steps cannot be captured then.
    pub fn needs_host(&self) -> bool {
        self.bridge().is_some() || self.copy_engine || self.through_store
    }
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
    /// Captured once a batch size, launched as one graph; where the host takes part in a step, as [`StepMode::Streams`].
    #[default]
    Graph,
    /// Queued kernel by kernel on the same streams.
    Streams,
}

impl CudaOptions {
    /// Whether the host takes part in a step.
    pub fn needs_host(&self) -> bool {
        matches!(&self.residency, Residency::Sparse(sparse) if sparse.needs_host())
    }
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
    /// Layers whose full KV may be on the device during a prefill; `None` takes as many as cost no request its
    /// place, so that the first decode step need not fetch them back.
    pub prefill_layers: Option<usize>,
    /// Multiprocessors of a prefill beside which others decode, rounded up to what the device can set apart; `None` lets it
    /// take all.
    pub prefill_multiprocessors: Option<u32>,
    /// How steps reach the device.
    pub mode: StepMode,
}

impl CudaOptions {
    /// Prompt tokens that pass the MLP at a time: a power of two, and whole blocks.
    pub(super) fn chunk(&self) -> usize {
        self.prefill_chunk.next_power_of_two().min(self.max_context.next_power_of_two()).max(BLOCK_TOKENS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::policy::Kept;

    const CODE: DeviceCode = DeviceCode::new("policy.cuh", "");

    fn options(scores: ScoreSource, kept: Kept) -> SparseOptions {
        SparseOptions {
            budget_blocks: 8,
            cap: 1,
            source: QuerySource::Current,
            correction: None,
            ranking: Some(ScoreRanking { scores, kept }),
            summarizer: Some(CODE),
            summary_bytes: 256,
            selector: Some(CODE),
            follows_link: false,
            gather: GatherOptions::default(),
            copy_engine: false,
            host: HostOptions { capacity: 0, alias: None },
            draft_window: None,
            through_store: false,
            observed: false,
        }
    }

    #[test]
    fn only_policies_without_device_code_need_the_host() {
        let by_summaries = options(ScoreSource::Summaries(Aggregate::Max), Kept { sinks: 1, recent: 6 });
        assert_eq!((by_summaries.bridge(), by_summaries.device_summary()), (None, 256));
        assert_eq!(by_summaries.scoring(), Some((CODE, Aggregate::Max)));
        let without_selector = SparseOptions { selector: None, ..by_summaries.clone() };
        assert_eq!(without_selector.bridge(), Some(Bridge::Selection));
        let without_summarizer = SparseOptions { summarizer: None, ..by_summaries.clone() };
        assert_eq!((without_summarizer.bridge(), without_summarizer.device_summary()), (Some(Bridge::Prediction), 0));
        let adaptive = SparseOptions { follows_link: true, ..by_summaries.clone() };
        assert_eq!(adaptive.bridge(), None);
        assert_eq!(SparseOptions { copy_engine: true, ..adaptive }.bridge(), Some(Bridge::Selection));
        let without_ranking = SparseOptions { ranking: None, ..by_summaries };
        assert_eq!((without_ranking.bridge(), without_ranking.device_summary()), (Some(Bridge::Prediction), 0));
    }

    #[test]
    fn the_host_runs_what_is_observed() {
        let window = Kept { sinks: 1, recent: usize::MAX };
        let policies = [
            options(ScoreSource::Summaries(Aggregate::Max), Kept::default()),
            options(ScoreSource::Summaries(Aggregate::Sum), window),
            options(ScoreSource::Hash(HashSeed(5)), Kept::default()),
        ];
        for policies in policies {
            assert_eq!(policies.bridge(), None);
            let observed = SparseOptions { observed: true, ..policies };
            assert_eq!((observed.bridge(), observed.device_summary()), (Some(Bridge::Prediction), 0));
            assert_eq!((observed.scoring(), observed.hash(), observed.needs_host()), (None, None, true));
        }
    }

    #[test]
    fn choices_again_or_ahead_are_the_devices_own() {
        let plain = options(ScoreSource::Summaries(Aggregate::Sum), Kept::default());
        assert!(!plain.needs_device());
        let again = SparseOptions { correction: Some(Correction { min_similarity: 0.9 }), ..plain.clone() };
        let ahead = SparseOptions { source: QuerySource::PreviousLayer, ..plain };
        assert!(again.needs_device() && !again.ranks_ahead());
        assert!(ahead.needs_device() && ahead.ranks_ahead());
    }

    #[test]
    fn neither_a_window_nor_a_hash_needs_summaries() {
        let window = options(ScoreSource::Summaries(Aggregate::Sum), Kept { sinks: 1, recent: usize::MAX });
        let random = options(ScoreSource::Hash(HashSeed(5)), Kept::default());
        assert_eq!((window.hash(), random.hash()), (None, Some(HashSeed(5))));
        for options in [window, random] {
            let without_summarizer = SparseOptions { summarizer: None, ..options };
            assert_eq!((without_summarizer.bridge(), without_summarizer.device_summary()), (None, 0));
        }
    }
}
