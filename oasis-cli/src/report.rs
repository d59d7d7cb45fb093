//! What a run cost, for people and as JSON.

use crate::text::{columns, grouped, size};
use oasis_core::executor::{ExecutorInfo, ExecutorStats};
use oasis_core::geometry::KvFootprint;
use oasis_core::pipeline::{PipelineMetrics, Stage};
use serde::Serialize;
use std::io::{self, Write};
use std::time::Duration;

/// One request, as the caller saw it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RequestFacts {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// From the submission to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Device memory while it decoded.
    pub device: KvFootprint,
}

/// Report of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunReport {
    /// Name or path of the model.
    pub model: String,
    /// Name or path of the draft head.
    pub draft: Option<String>,
    /// Device in words.
    pub device: String,
    /// Tokens and times.
    pub speed: Speed,
    /// Device memory.
    pub memory: Memory,
    /// What crossed the link; absent in dense decoding.
    pub link: Option<Link>,
    /// Background stages; absent in dense decoding.
    pub pipeline: Option<PipelineReport>,
    /// Agreement of the predicted with the exact choice of blocks, where it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agreement: Option<Agreement>,
}

/// Tokens and times.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Speed {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Seconds from the submission to the first token.
    pub prefill_seconds: f64,
    /// Prompt tokens a second.
    pub prefill_tokens_per_second: Option<f64>,
    /// Seconds from the first token to the last.
    pub decode_seconds: f64,
    /// Tokens a second after the first; absent for a single token.
    pub decode_tokens_per_second: Option<f64>,
}

/// Device memory of the KV cache while decoding, bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Memory {
    /// Blocks per KV head on the device, K; absent in dense decoding.
    pub budget_blocks: Option<usize>,
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Working sets, tails and draft scratch.
    pub working_set_bytes: u64,
    /// Summaries of all blocks.
    pub summary_bytes: u64,
    /// KV of the draft head.
    pub draft_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
    /// What a dense cache of the same context holds.
    pub dense_bytes: u64,
    /// `total_bytes / dense_bytes`.
    pub share_of_dense: f64,
    /// Most ever held, the layer being prefilled included.
    pub peak_bytes: u64,
}

/// What crossed the link while decoding. An entry is one block of one KV head.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Link {
    /// Decode steps.
    pub steps: u64,
    /// Bytes of admitted entries.
    pub bytes: u64,
    /// Bytes of admitted entries a step.
    pub bytes_per_step: f64,
    /// Entries of first working sets.
    pub filled_entries: u64,
    /// Admitted entries.
    pub admitted_entries: u64,
    /// Entries that the cap would have let in.
    pub allowed_entries: u64,
    /// `admitted_entries / allowed_entries`.
    pub cap_use: f64,
    /// Wanted entries that the cap left outside.
    pub deferred_entries: u64,
    /// Most admissions a KV head and step, C.
    pub cap: usize,
}

/// Background stages and what the foreground waited for them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PipelineReport {
    /// One a stage, in order.
    pub stages: Vec<StageReport>,
    /// Seconds that the foreground waited for layers.
    pub foreground_wait_seconds: f64,
    /// How often it waited.
    pub waits: u64,
}

/// One background stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageReport {
    /// Name.
    pub stage: &'static str,
    /// Tasks done.
    pub tasks: u64,
    /// Mean microseconds of a task.
    pub mean_us: f64,
    /// Longest task in microseconds.
    pub longest_us: f64,
    /// Most tasks that ever waited.
    pub deepest_queue: usize,
}

/// Share of the exact choice of blocks that was predicted, 0 to 1.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Agreement {
    /// Mean over layers.
    pub mean: f64,
    /// Of the worst layer.
    pub min: f64,
    /// One a layer.
    pub layers: Vec<f64>,
}

impl Agreement {
    /// From one mean a layer; `None` without layers.
    pub fn of_layers(layers: Vec<f64>) -> Option<Self> {
        let min = layers.iter().copied().reduce(f64::min)?;
        Some(Self { mean: layers.iter().sum::<f64>() / layers.len() as f64, min, layers })
    }
}

impl RunReport {
    /// Report of one request on an executor that ran nothing else.
    pub fn new(
        model: String,
        draft: Option<String>,
        info: &ExecutorInfo,
        stats: &ExecutorStats,
        request: &RequestFacts,
    ) -> Self {
        let sparse = info.budget_blocks.is_some();
        Self {
            model,
            draft,
            device: info.device.clone(),
            speed: Speed::new(request),
            memory: Memory::new(info, stats, request),
            link: sparse.then(|| Link::new(info, stats)),
            pipeline: stats.pipeline.as_ref().map(PipelineReport::new),
            agreement: None,
        }
    }

    /// Adds a measured agreement.
    #[must_use]
    pub fn with_agreement(mut self, agreement: Option<Agreement>) -> Self {
        self.agreement = agreement;
        self
    }

    /// Writes the report for people.
    ///
    /// # Errors
    /// The writer's.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        for line in columns(&self.rows()) {
            writeln!(out, "{line}")?;
        }
        Ok(())
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = Vec::new();
        let mut row = |key: &str, value: String| rows.push(vec![key.to_owned(), value]);
        let draft = self.draft.as_ref().map_or_else(|| "no draft head".to_owned(), |d| format!("draft head {d}"));
        row("model", format!("{}, {draft}", self.model));
        row("device", self.device.clone());
        self.speed.rows(&mut row);
        self.memory.rows(&mut row);
        if let Some(link) = &self.link {
            link.rows(&mut row);
        }
        if let Some(pipeline) = &self.pipeline {
            pipeline.rows(&mut row);
        }
        if let Some(agreement) = &self.agreement {
            row("agreement", format!("{:.3} mean, {:.3} in the worst layer", agreement.mean, agreement.min));
        }
        rows
    }
}

/// Receives a key and a value to print.
type Row<'a> = &'a mut dyn FnMut(&str, String);

impl Speed {
    fn new(request: &RequestFacts) -> Self {
        let rate =
            |tokens: usize, time: Duration| (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64());
        Self {
            prompt_tokens: request.prompt_tokens,
            generated_tokens: request.generated_tokens,
            prefill_seconds: request.prefill.as_secs_f64(),
            // Without a first token the prompt was not read to its end.
            prefill_tokens_per_second: rate(request.prompt_tokens, request.prefill)
                .filter(|_| request.generated_tokens > 0),
            decode_seconds: request.decode.as_secs_f64(),
            decode_tokens_per_second: rate(request.generated_tokens.saturating_sub(1), request.decode),
        }
    }

    fn rows(&self, row: Row<'_>) {
        let line = |tokens: usize, seconds: f64, rate: Option<f64>| {
            let rate = rate.map_or_else(String::new, |rate| format!(", {rate:.1} tokens/s"));
            if self.generated_tokens == 0 {
                return format!("{} tokens, not finished after {seconds:.2} s", grouped(tokens as u64));
            }
            format!("{} tokens in {seconds:.2} s{rate}", grouped(tokens as u64))
        };
        row("prefill", line(self.prompt_tokens, self.prefill_seconds, self.prefill_tokens_per_second));
        row("decode", line(self.generated_tokens, self.decode_seconds, self.decode_tokens_per_second));
    }
}

impl Memory {
    fn new(info: &ExecutorInfo, stats: &ExecutorStats, request: &RequestFacts) -> Self {
        // The last token is returned but never run.
        let context = request.prompt_tokens + request.generated_tokens.saturating_sub(1);
        let (total_bytes, dense_bytes) = (request.device.total(), info.geometry.dense_bytes(context));
        Self {
            budget_blocks: info.budget_blocks,
            block_tokens: info.geometry.block_tokens,
            working_set_bytes: request.device.working_set,
            summary_bytes: request.device.summaries,
            draft_bytes: request.device.draft,
            total_bytes,
            dense_bytes,
            share_of_dense: ratio(total_bytes, dense_bytes),
            peak_bytes: stats.device_peak.total(),
        }
    }

    fn rows(&self, row: Row<'_>) {
        let budget = self.budget_blocks.map_or_else(
            || "all blocks (dense)".to_owned(),
            |blocks| format!("{blocks} blocks of {} tokens a KV head", self.block_tokens),
        );
        row("budget", budget);
        let (total, dense) = (size(self.total_bytes), size(self.dense_bytes));
        row("device KV", format!("{total}, {:.1}% of a dense cache's {dense}", 100.0 * self.share_of_dense));
        let parts = [
            ("working set", self.working_set_bytes),
            ("summaries", self.summary_bytes),
            ("draft head", self.draft_bytes),
            ("peak", self.peak_bytes),
        ];
        row("", parts.map(|(name, bytes)| format!("{name} {}", size(bytes))).join(", "));
    }
}

impl Link {
    fn new(info: &ExecutorInfo, stats: &ExecutorStats) -> Self {
        Self {
            steps: stats.steps,
            bytes: stats.link_bytes,
            bytes_per_step: ratio(stats.link_bytes, stats.steps),
            filled_entries: stats.filled_entries,
            admitted_entries: stats.admitted_entries,
            allowed_entries: stats.cap_entries,
            cap_use: ratio(stats.admitted_entries, stats.cap_entries),
            deferred_entries: stats.deferred_entries,
            cap: info.cap,
        }
    }

    fn rows(&self, row: Row<'_>) {
        let (step, total) = (size(self.bytes_per_step.round() as u64), size(self.bytes));
        row("link", format!("{step} a step, {total} in {} steps", grouped(self.steps)));
        row(
            "cap",
            format!(
                "{} of {} entries admitted ({:.0}%), {} deferred",
                grouped(self.admitted_entries),
                grouped(self.allowed_entries),
                100.0 * self.cap_use,
                grouped(self.deferred_entries),
            ),
        );
    }
}

impl PipelineReport {
    fn new(pipeline: &PipelineMetrics) -> Self {
        let stage = |name, stage| {
            let metrics = pipeline.stage(stage);
            StageReport {
                stage: name,
                tasks: metrics.tasks,
                mean_us: metrics.mean().as_secs_f64() * 1e6,
                longest_us: metrics.longest.as_secs_f64() * 1e6,
                deepest_queue: metrics.deepest_queue,
            }
        };
        Self {
            stages: vec![
                stage("predict", Stage::Predict),
                stage("select", Stage::Select),
                stage("transfer", Stage::Transfer),
            ],
            foreground_wait_seconds: pipeline.foreground_wait.as_secs_f64(),
            waits: pipeline.waits,
        }
    }

    fn rows(&self, row: Row<'_>) {
        for StageReport { stage, tasks, mean_us, longest_us, deepest_queue } in &self.stages {
            let tasks = grouped(*tasks);
            row(
                stage,
                format!(
                    "{mean_us:.0} us a task, {longest_us:.0} us at most, {tasks} tasks, queue up to {deepest_queue}"
                ),
            );
        }
        let mean = if self.waits == 0 { 0.0 } else { 1e6 * self.foreground_wait_seconds / self.waits as f64 };
        let total = self.foreground_wait_seconds;
        row("wait", format!("{mean:.0} us a layer and step, {total:.2} s in all"));
    }
}

/// `part / whole`, 0 where there is no whole.
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests;
