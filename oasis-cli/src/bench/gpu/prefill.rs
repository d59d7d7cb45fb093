//! Time to the first token of one request.

use super::{Conditions, Subject, expect_admitted, sequence};
use crate::args::{GlobalArgs, count};
use crate::bench::Longest;
use crate::error::CliResult;
use crate::generate::read_prompt;
use crate::text::columns;
use clap::Args;
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::RequestId;
use oasis_cuda::measure::kernels::TENSOR_FLOPS;
use oasis_models::spec::DecoderSpec;
use serde::Serialize;
use std::io::Write;
use std::time::Instant;

/// Arguments of `bench prefill`.
#[derive(Debug, Args)]
pub struct PrefillArgs {
    /// Prompt tokens; several to sweep
    #[arg(long, value_name = "TOKENS,...", value_delimiter = ',', default_value = "16384,32000", value_parser = count(1))]
    context: Vec<usize>,
    /// Prompts of each length; the fastest counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count(1))]
    repeat: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// What is measured.
    #[command(flatten)]
    pub subject: Subject,
}

/// One measured length.
#[derive(Debug, Serialize)]
struct Point {
    context: usize,
    /// From the admission to the first token.
    first_token_ms: f64,
    tokens_per_second: f64,
    /// The step after it, which sees the full KV and chooses the first working set.
    first_step_ms: f64,
    /// Products of weights and of attention that something reads, over 790 TFLOP/s.
    floor_ms: f64,
    tflop_s: f64,
    over_floor: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    conditions: Conditions,
    points: Vec<Point>,
}

/// Measures and prints.
///
/// # Errors
/// When the input is wrong, a prompt does not fit, or the device fails.
pub fn run(args: &PrefillArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let longest = Longest {
        argument: "--context",
        prompt: args.context.iter().copied().max().unwrap_or(1),
        after: 2,
        hint: "lower --context",
    };
    let bench = args.subject.open(global, 1, &longest)?;
    let mut executor = bench.start(bench.options(false)?)?;
    let mut points = Vec::new();
    for (index, context) in args.context.iter().enumerate() {
        let (mut first_token, mut first_step) = (f64::MAX, f64::MAX);
        // One more goes first: products choose their algorithms.
        for repeat in 0..=args.repeat {
            let id = (index * 1000 + repeat) as u64;
            let vocab = executor.info().vocab;
            let start = Instant::now();
            expect_admitted(executor.admit(sequence(id, *context, 2, vocab))?)?;
            let token = read_prompt(&mut executor, RequestId(id))?;
            let prefilled = start.elapsed().as_secs_f64() * 1e3;
            let start = Instant::now();
            executor.decode(&[DecodeRow { request: RequestId(id), token }])?;
            let decoded = start.elapsed().as_secs_f64() * 1e3;
            executor.release(RequestId(id));
            if repeat > 0 {
                (first_token, first_step) = (first_token.min(prefilled), first_step.min(decoded));
            }
        }
        let products = products(&bench.spec, *context);
        let floor_ms = products / TENSOR_FLOPS * 1e3;
        points.push(Point {
            context: *context,
            first_token_ms: first_token,
            tokens_per_second: *context as f64 / first_token * 1e3,
            first_step_ms: first_step,
            floor_ms,
            tflop_s: products / first_token / 1e9,
            over_floor: first_token / floor_ms,
        });
    }
    let report = Report { device: executor.info().device.clone(), conditions: bench.conditions(), points };
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        return Ok(writeln!(out)?);
    }
    writeln!(out, "{}: {}\n", report.device, report.conditions.line())?;
    let header = ["prompt", "first token", "tokens/s", "TFLOP/s", "floor", "over floor", "first step"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for p in &report.points {
        rows.push(vec![
            p.context.to_string(),
            format!("{:.0} ms", p.first_token_ms),
            format!("{:.0}", p.tokens_per_second),
            format!("{:.0}", p.tflop_s),
            format!("{:.0} ms", p.floor_ms),
            format!("{:.2} x", p.over_floor),
            format!("{:.1} ms", p.first_step_ms),
        ]);
    }
    Ok(writeln!(out, "{}", columns(&rows).join("\n"))?)
}

/// Floating-point operations of a prompt: two a weight and token, and causal attention. Of the last layer, keys and values
/// of all tokens, and what follows of the last one alone. A draft head's are not counted.
pub(super) fn products(spec: &DecoderSpec, tokens: usize) -> f64 {
    let (tokens, hidden) = (tokens as f64, spec.hidden as f64);
    let (q, kv) = ((spec.q_heads * spec.head_dim) as f64, (2 * spec.kv_heads * spec.head_dim) as f64);
    let mlp = |layer: usize| match &spec.moe {
        Some(moe) if moe.sparse_layers[layer] => {
            hidden * (moe.experts + 3 * moe.experts_per_token * moe.intermediate) as f64
        }
        _ => 3.0 * hidden * spec.intermediate as f64,
    };
    // `outputs` tokens see `pairs` keys together.
    let layer = |layer: usize, outputs: f64, pairs: f64| {
        2.0 * (tokens * kv * hidden + outputs * (2.0 * q * hidden + mlp(layer))) + 4.0 * q * pairs
    };
    let last = spec.layers - 1;
    let before: f64 = (0..last).map(|index| layer(index, tokens, tokens * (tokens + 1.0) / 2.0)).sum();
    before + layer(last, 1.0, tokens) + 2.0 * hidden * spec.vocab as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_models::shapes;

    #[test]
    fn products_are_those_of_tokens_that_something_reads() {
        let (spec, _) = shapes::named("qwen3-8b").expect("the shape is known");
        // One token passes every weight but the embedding once, and sees itself in every layer.
        let weights = 36_u64 * (4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 12_288) + 4096 * 151_936;
        assert_eq!(products(&spec, 1), (2 * weights + 36 * 4 * 4096) as f64);
        // A second one: all of it in 35 layers, where it sees two; in the last one keys and values, and one key more.
        let second = 35_u64 * (2 * (4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 12_288) + 2 * 4 * 4096)
            + (2 * 4096 * 2048 + 4 * 4096);
        assert_eq!(products(&spec, 2) - products(&spec, 1), second as f64);
    }

    #[test]
    fn a_mixture_counts_its_router_and_the_experts_that_a_token_takes() {
        let (spec, _) = shapes::named("qwen3-30b-a3b").expect("the shape is known");
        let layer = 2048_u64 * (4096 + 2 * 512) + 4096 * 2048 + 2048 * (128 + 3 * 8 * 768);
        let weights = 48 * layer + 2048 * 151_936;
        assert_eq!(products(&spec, 1), (2 * weights + 48 * 4 * 4096) as f64);
    }
}
