//! Typed configuration: what a run is made of, where each value came from, and one clear error when one is wrong.

mod bytes;
mod error;
mod layers;
mod schema;

pub use bytes::Bytes;
pub use error::ConfigError;
pub use layers::{ENV_PREFIX, Layer, Origin, Resolved};
pub use schema::json_schema;

use crate::memory::{StoreSpec, TransportSpec};
use crate::policy::{PredictorSpec, SelectorSpec, SummarizerSpec};
use crate::sampling::SamplingParams;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Everything a run is assembled from.
#[derive(Debug, Serialize)]
pub struct Config {
    /// Which model and draft head.
    pub model: ModelConfig,
    /// How the KV cache is cut and how much of it stays on the device.
    pub kv: KvConfig,
    /// What blocks are summarised by.
    pub summarizer: Box<dyn SummarizerSpec>,
    /// Which blocks the next step will want.
    pub predictor: Box<dyn PredictorSpec>,
    /// Which of them are admitted.
    pub selector: Box<dyn SelectorSpec>,
    /// How entries reach the device.
    pub transport: Box<dyn TransportSpec>,
    /// Where the full KV lives.
    pub store: Box<dyn StoreSpec>,
    /// Which device computes.
    pub device: DeviceConfig,
    /// How requests are batched.
    pub engine: EngineConfig,
    /// How blocks cross between a prefill and a decode node.
    pub nodes: NodesConfig,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
}

/// Section `[model]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// A directory, a .gguf file, or the name of an embedded model.
    pub path: String,
    /// A directory with an EAGLE-3 head, the name of an embedded one, `auto` (the embedded head of an embedded
    /// model, else none) or `none`.
    pub draft: String,
    /// Precision of weights on the device: `auto` (as stored), `f32` or `bf16`.
    pub dtype: WeightDtype,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self { path: "oasis-tiny".to_owned(), draft: "auto".to_owned(), dtype: WeightDtype::Auto }
    }
}

/// Precision of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightDtype {
    /// As stored; quantised weights become bf16.
    Auto,
    /// 32-bit float.
    F32,
    /// Brain float.
    Bf16,
}

/// Section `[kv]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvConfig {
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Blocks per KV head on the device, K, or `all` for dense decoding.
    pub budget_blocks: Budget,
    /// First layers that keep every block on the device.
    pub dense_layers: usize,
    /// Newest blocks of its own KV that the draft head keeps and attends to, or `all`.
    pub draft_blocks: Budget,
}

impl KvConfig {
    /// Blocks of the draft head's window; `None` for all.
    pub fn draft_window(&self) -> Option<usize> {
        match self.draft_blocks {
            Budget::Blocks(blocks) => Some(blocks),
            Budget::All => None,
        }
    }
}

impl Default for KvConfig {
    fn default() -> Self {
        Self { block_tokens: 16, budget_blocks: Budget::Blocks(128), dense_layers: 0, draft_blocks: Budget::All }
    }
}

/// How many blocks of a KV head stay on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BudgetValue", into = "BudgetValue")]
pub enum Budget {
    /// At most this many: sparse decoding once a context is longer.
    Blocks(usize),
    /// Every block: dense decoding, nothing leaves the device.
    All,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number of blocks or \"all\"")]
enum BudgetValue {
    Blocks(usize),
    Word(String),
}

impl TryFrom<BudgetValue> for Budget {
    type Error = String;

    fn try_from(value: BudgetValue) -> Result<Self, String> {
        match value {
            BudgetValue::Blocks(blocks) => Ok(Self::Blocks(blocks)),
            BudgetValue::Word(word) if word == "all" => Ok(Self::All),
            BudgetValue::Word(word) => Err(format!("expected a number of blocks or \"all\", found \"{word}\"")),
        }
    }
}

impl From<Budget> for BudgetValue {
    fn from(budget: Budget) -> Self {
        match budget {
            Budget::Blocks(blocks) => Self::Blocks(blocks),
            Budget::All => Self::Word("all".to_owned()),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks(blocks) => blocks.fmt(f),
            Self::All => f.write_str("all"),
        }
    }
}

/// Section `[device]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceConfig {
    /// `cpu` or `cuda`.
    pub kind: DeviceKind,
    /// Which CUDA device.
    pub ordinal: usize,
    /// Threads of the CPU executor; 0 takes every core.
    pub threads: usize,
    /// Most bytes of KV on the CPU device over all requests; 0 sets no limit.
    pub kv_memory: Bytes,
    /// Most bytes of a CUDA device's memory, weights included; 0 takes what is free.
    pub memory: Bytes,
    /// Longest context on a CUDA device in tokens, prompt and answer together; 0 is the model's.
    pub max_context: usize,
    /// How a decode step reaches a CUDA device: as one graph, or kernel by kernel on streams.
    pub step: StepLaunch,
    /// Multiprocessors of a prefill on a CUDA device that is nearly full of requests that decode, so that steps need not wait
    /// for its long kernels; 0 lets it take all.
    pub prefill_multiprocessors: u32,
    /// Layers whose full KV a prefill may keep on a CUDA device; 0 takes as many as cost no request its
    /// place.
    pub prefill_layers: usize,
}

/// How a decode step reaches a CUDA device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StepLaunch {
    /// Captured once a batch size and launched as one graph.
    Graph,
    /// Queued kernel by kernel.
    Streams,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            kind: DeviceKind::Cpu,
            ordinal: 0,
            threads: 0,
            kv_memory: Bytes(0),
            memory: Bytes(0),
            max_context: 0,
            step: StepLaunch::Graph,
            prefill_multiprocessors: 96,
            prefill_layers: 0,
        }
    }
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU executor.
    Cpu,
    /// A CUDA device.
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

/// Section `[engine]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Most requests that decode together.
    pub max_batch: usize,
    /// Prompt tokens of one prefill chunk; 0 is what suits the device: 512 on a CPU, 8,192 on a GPU.
    pub prefill_chunk: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { max_batch: 8, prefill_chunk: 0 }
    }
}

/// Section `[nodes]`: of a prefill and a decode node; a single node ignores it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NodesConfig {
    /// What blocks cross over: `tcp`, `roce` or `ucx-tcp`.
    pub transport: NodeTransport,
    /// UCX's library, a path or a name; `auto` lets the dynamic linker search for `libucp.so.0`.
    pub ucx_library: String,
    /// RDMA adapter and port such as `mlx5_0:1`, several with commas, or the network interface of `ucx-tcp`; `auto` takes
    /// any adapter, and loopback for `ucx-tcp`.
    pub ucx_device: String,
}

impl Default for NodesConfig {
    fn default() -> Self {
        let auto = || "auto".to_owned();
        Self { transport: NodeTransport::Tcp, ucx_library: auto(), ucx_device: auto() }
    }
}

/// What blocks cross between nodes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeTransport {
    /// Messages of the nodes' own TCP session.
    Tcp,
    /// One-sided reads of an RDMA adapter, by UCX.
    Roce,
    /// One-sided reads that UCX emulates over TCP: for tests of the same code without an adapter.
    UcxTcp,
}

impl Config {
    /// Prompt tokens of one prefill chunk on the chosen device.
    pub fn prefill_chunk(&self) -> usize {
        match (self.engine.prefill_chunk, self.device.kind) {
            (0, DeviceKind::Cpu) => 512,
            (0, DeviceKind::Cuda) => 8192,
            (chunk, _) => chunk,
        }
    }

    /// Checks values that no section can check alone.
    ///
    /// # Errors
    /// Names the key, what was expected, what was found.
    fn validate(&self) -> Result<(), ConfigError> {
        let at_least_one = |key: &'static str, value: usize| match value {
            0 => Err(ConfigError::new(key, "a number of at least 1", 0)),
            _ => Ok(()),
        };
        at_least_one("kv.block_tokens", self.kv.block_tokens)?;
        if let Budget::Blocks(0) = self.kv.budget_blocks {
            return Err(ConfigError::new("kv.budget_blocks", "at least 1 block, or \"all\"", 0)
                .hint("128 blocks of 16 tokens is the usual budget"));
        }
        if let Budget::Blocks(0) = self.kv.draft_blocks {
            return Err(
                ConfigError::new("kv.draft_blocks", "at least 1 block, or \"all\"", 0).hint("\"all\" is the default")
            );
        }
        at_least_one("engine.max_batch", self.engine.max_batch)?;
        let SamplingParams { temperature, top_p, .. } = self.sampling;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(ConfigError::new("sampling.temperature", "a number of at least 0", temperature));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ConfigError::new("sampling.top_p", "a number above 0 and at most 1", top_p));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
