//! The CPU executor: prefill, and decode steps dense, sparse, and sparse with its background stages paused.
//!
//! All three decode from one prefill, in turns of a few steps, so that whatever else the machine does touches them
//! alike; the figure of a mode is the median of its steps.

use crate::assemble::{self, Model};
use crate::error::{CliError, CliResult};
use crate::text::{columns, size};
use oasis_core::config::{Config, Resolved};
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::pipeline::{Stage, Tracer};
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::{CpuExecutor, CpuModel, PromptState, Residency};
use rayon::prelude::*;
use serde::Serialize;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Steps of one mode before the next has its turn.
const TURN: usize = 8;
/// Steps before the first turn: the first of a sparse request reads the full KV from the store.
const WARM_UP: usize = 2;

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CpuBench {
    /// Model.
    pub model: String,
    /// Threads of the foreground.
    pub device: String,
    /// Prompt tokens.
    pub context: usize,
    /// Blocks per KV head on the device, K.
    pub budget_blocks: usize,
    /// Streaming read of the machine in this run, bytes a second.
    pub read_bandwidth: f64,
    /// Prompt tokens a second.
    pub prefill_tokens_per_second: f64,
    /// Dense steps.
    pub dense: Steps,
    /// Sparse steps with the lookahead.
    pub sparse: Steps,
    /// The same with the background stages paused.
    pub paused: Steps,
    /// `dense / sparse` in time.
    pub speedup: f64,
    /// `sparse / paused - 1` in time: what the three stages add.
    pub stage_overhead: f64,
    /// Mean milliseconds of each background stage a step.
    pub stages: Vec<(&'static str, f64)>,
    /// Milliseconds a step that the foreground waited for layers.
    pub wait: f64,
}

/// Decode steps of one mode.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Steps {
    /// Steps measured.
    pub count: usize,
    /// Median milliseconds.
    pub median_ms: f64,
    /// 10th and 90th percentile, milliseconds.
    pub spread_ms: [f64; 2],
    /// Bytes that a step must read.
    pub floor_bytes: u64,
    /// Milliseconds that reading them takes at the measured bandwidth.
    pub floor_ms: f64,
}

/// Most tokens that follow the prompt where each mode is measured over `steps` steps. Sparse and paused ones are decoded on
/// one request, and the first step of a turn is not measured.
pub fn room(steps: usize) -> usize {
    3 * (steps + TURN) + WARM_UP
}

/// Measures `steps` steps of each mode after `prompt`.
///
/// # Errors
/// When the settings are dense, or a request fails.
pub fn measure(resolved: &Resolved, model: &Model, prompt: &[TokenId], steps: usize) -> CliResult<CpuBench> {
    let config = &resolved.config;
    let weights = assemble::load_model(config, model)?;
    let policies = assemble::build_policies(resolved, model)?;
    let mut sparse = assemble::start_executor(config, weights.clone(), policies, Tracer::default())?;
    let mut dense = dense(config, &weights)?;
    let Some(budget) = sparse.info().budget_blocks else {
        return Err(CliError::Input("kv.budget_blocks: expected a number of blocks, found \"all\"".to_owned()));
    };

    let start = Instant::now();
    let state = PromptState::read(&weights, prompt, config.prefill_chunk(), &mut |_, _| ());
    let prefill = start.elapsed().as_secs_f64();
    let request = RequestId(1);
    let mut tokens = [0, 1].map(|_| TokenId(0));
    for (executor, token) in [&mut dense, &mut sparse].into_iter().zip(&mut tokens) {
        *token = executor.resume(&state, request, room(steps), SamplingParams::default())?;
        for _ in 0..WARM_UP {
            *token = step(executor, *token)?;
        }
    }
    let before = sparse.stats();
    let mut times: [Vec<f64>; 3] = Default::default();
    let mut bandwidths = vec![read_bandwidth()];
    while times[0].len() < steps {
        for (mode, times) in times.iter_mut().enumerate() {
            crate::interrupt::check()?;
            let (executor, token) = match mode {
                0 => (&mut dense, &mut tokens[0]),
                _ => (&mut sparse, &mut tokens[1]),
            };
            executor.pause_background(mode == 2);
            // The first step of a turn still pays for the mode before it.
            *token = step(executor, *token)?;
            for _ in 0..TURN {
                let start = Instant::now();
                *token = step(executor, *token)?;
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        bandwidths.push(read_bandwidth());
    }
    let after = sparse.stats();
    let [pipeline_before, pipeline_after] = [&before, &after].map(|stats| stats.pipeline.unwrap_or_default());
    let lookahead_steps = (times[1].len() + times[1].len() / TURN) as f64;
    let per_step = |seconds: f64| seconds * 1e3 / lookahead_steps;
    let stages = Stage::ALL.map(|stage| {
        let busy = pipeline_after.stage(stage).busy - pipeline_before.stage(stage).busy;
        (stage.name(), per_step(busy.as_secs_f64()))
    });
    let wait = per_step((pipeline_after.foreground_wait - pipeline_before.foreground_wait).as_secs_f64());

    let read_bandwidth = bandwidths.iter().copied().fold(0.0, f64::max);
    let geometry = sparse.info().geometry;
    let kv = sparse.stats().device;
    let dense_bytes = weights.step_weight_bytes() + geometry.dense_bytes(prompt.len());
    let sparse_bytes = weights.step_weight_bytes() + weights.draft_weight_bytes() + kv.working_set + kv.draft;
    let [dense_times, sparse_times, paused_times] = times;
    let dense = Steps::new(dense_times, dense_bytes, read_bandwidth);
    let sparse_steps = Steps::new(sparse_times, sparse_bytes + kv.summaries, read_bandwidth);
    let paused = Steps::new(paused_times, sparse_bytes, read_bandwidth);
    Ok(CpuBench {
        model: model.checkpoint.provenance().name,
        device: sparse.info().device.clone(),
        context: prompt.len(),
        budget_blocks: budget,
        read_bandwidth,
        prefill_tokens_per_second: prompt.len() as f64 / prefill,
        speedup: dense.median_ms / sparse_steps.median_ms,
        stage_overhead: sparse_steps.median_ms / paused.median_ms - 1.0,
        dense,
        sparse: sparse_steps,
        paused,
        stages: stages.to_vec(),
        wait,
    })
}

fn dense(config: &Config, weights: &Arc<CpuModel>) -> CliResult<CpuExecutor> {
    Ok(CpuExecutor::new(weights.clone(), Residency::Dense, assemble::cpu_options(config), Tracer::default())?)
}

fn step(executor: &mut CpuExecutor, token: TokenId) -> CliResult<TokenId> {
    let rows = [DecodeRow { request: RequestId(1), token }];
    executor.decode(&rows)?.remove(0).map_err(|error| CliError::Failure(error.to_string()))
}

/// Bytes a second of a plain read of 512 MiB with all threads, best of three.
fn read_bandwidth() -> f64 {
    const WORDS: usize = 64 << 20;
    let data = vec![1_u64; WORDS];
    let best = (0..3).map(|_| {
        let start = Instant::now();
        let sum: u64 = (data.par_chunks(1 << 16))
            .map(|chunk| {
                let mut lanes = [0_u64; 16];
                for words in chunk.chunks_exact(16) {
                    for (lane, word) in lanes.iter_mut().zip(words) {
                        *lane = lane.wrapping_add(*word);
                    }
                }
                lanes.iter().sum::<u64>()
            })
            .sum();
        black_box(sum);
        start.elapsed().as_secs_f64()
    });
    size_of_val(data.as_slice()) as f64 / best.fold(f64::INFINITY, f64::min)
}

impl Steps {
    fn new(mut times: Vec<f64>, floor_bytes: u64, bandwidth: f64) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        Self {
            count: times.len(),
            median_ms: at(0.5),
            spread_ms: [at(0.1), at(0.9)],
            floor_bytes,
            floor_ms: floor_bytes as f64 / bandwidth * 1e3,
        }
    }
}

/// The figures as a table.
pub fn render(bench: &CpuBench) -> String {
    let mut text = format!(
        "{} on {}, context {} tokens, budget {} blocks\nstreaming read {:.1} GB/s; prefill {:.0} tokens/s\n\n",
        bench.model,
        bench.device,
        bench.context,
        bench.budget_blocks,
        bench.read_bandwidth / 1e9,
        bench.prefill_tokens_per_second,
    );
    let mut rows =
        vec![["decode step", "median", "10% .. 90%", "must read", "floor", "of the floor"].map(str::to_owned).to_vec()];
    for (name, steps) in [("dense", &bench.dense), ("sparse", &bench.sparse), ("sparse, stages paused", &bench.paused)]
    {
        rows.push(vec![
            name.to_owned(),
            format!("{:.2} ms", steps.median_ms),
            format!("{:.2} .. {:.2} ms", steps.spread_ms[0], steps.spread_ms[1]),
            size(steps.floor_bytes),
            format!("{:.2} ms", steps.floor_ms),
            format!("{:.2} x", steps.median_ms / steps.floor_ms),
        ]);
    }
    text.push_str(&columns(&rows).join("\n"));
    let stages: Vec<String> = bench.stages.iter().map(|(name, ms)| format!("{name} {ms:.2} ms")).collect();
    text.push_str(&format!(
        "\n\nsparse against dense: {:.2} x as fast\nthe background stages add {:.1}% to a step ({}; the foreground waits {:.2} ms)\n",
        bench.speedup,
        bench.stage_overhead * 100.0,
        stages.join(", "),
        bench.wait,
    ));
    text
}
