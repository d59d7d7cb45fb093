//! The kernels of steps and prefills one by one, each beside its floor.

use super::{Shape, resolve_on_gpu};
use crate::args::{GlobalArgs, count};
use crate::assemble;
use crate::error::{CliError, CliResult};
use crate::text::columns;
use clap::{Args, ValueEnum};
use oasis_core::config::{Budget, Layer};
use oasis_core::geometry::HeadShape;
use oasis_core::policy::DeviceCode;
use oasis_core::registry::{self, Role};
use oasis_cuda::device::Device;
use oasis_cuda::gemm::{GemmOptions, GemmShape, Gemms, Output};
use oasis_cuda::layout::BLOCK_TOKENS;
use oasis_cuda::measure::kernels::{GatherBeside, Heads, KernelBench, KernelTime};
use oasis_cuda::measure::{Ceilings, gather_options};
use oasis_models::spec::DecoderSpec;
use serde::Serialize;
use std::io::Write;

/// Arguments of `bench kernels`.
#[derive(Debug, Args)]
pub struct KernelsArgs {
    /// Shape of the model: qwen3-8b, llama-3.1-8b or qwen3-30b-a3b
    #[arg(long, value_name = "NAME", default_value = "qwen3-8b")]
    shape: Shape,
    /// Requests that decode together; several to sweep
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,16,64", value_parser = count(1))]
    batch: Vec<usize>,
    /// Tokens of each request's context, and of prompts, at least 16; several to sweep
    #[arg(long, value_name = "TOKENS,...", value_delimiter = ',', default_value = "16384", value_parser = count(BLOCK_TOKENS))]
    context: Vec<usize>,
    /// Measure these only
    #[arg(long, value_name = "KERNEL,...", value_delimiter = ',')]
    only: Vec<Kernel>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kernel {
    /// Attention over working sets
    Sparse,
    /// Attention over whole contexts
    Dense,
    /// Scores of summaries, of every summarizer with device code
    Scan,
    /// Top-K and the configured selector
    Select,
    /// Entries over the link, alone and beside attention and scan
    Gather,
    /// Attention of prompts
    Prefill,
    /// Linear layers
    Linear,
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    shape: String,
    ceilings: Ceilings,
    kernels: Vec<KernelTime>,
}

/// What all measurements share.
struct Subject {
    bench: KernelBench,
    device: Device,
    ceilings: Ceilings,
    spec: DecoderSpec,
    heads: Heads,
    /// Slots of a KV head, and most admissions.
    budget: (usize, usize),
    /// Kind and code of the selector; `None` where it has no device code.
    selector: (String, Option<DeviceCode>),
    /// Kind, code and bytes of every summarizer with device code.
    summarizers: Vec<(&'static str, DeviceCode, usize)>,
}

/// A draft token is scored and attended to beside each request's own.
const QUERIES: usize = 2;

/// Measures and prints.
///
/// # Errors
/// When the input is wrong, a batch does not fit, or the device fails.
pub fn run(args: &KernelsArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let subject = Subject::open(args, global)?;
    let wanted = |kernel| args.only.is_empty() || args.only.contains(&kernel);
    let mut kernels = Vec::new();
    for &batch in &args.batch {
        for &context in &args.context {
            subject.measure_decode((batch, context), &wanted, &mut kernels)?;
        }
        if wanted(Kernel::Linear) {
            subject.measure_linear(batch, &mut kernels)?;
        }
    }
    for &context in args.context.iter().filter(|_| wanted(Kernel::Prefill)) {
        kernels.push(subject.bench.time_prefill(subject.heads, context, context)?);
    }
    let Subject { device, ceilings, .. } = subject;
    let report = Report { device: device.facts.name.clone(), shape: args.shape.name.clone(), ceilings, kernels };
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        return Ok(writeln!(out)?);
    }
    writeln!(out, "{}: kernels of {}", report.device, report.shape)?;
    writeln!(
        out,
        "memory read {:.2} TB/s; link {:.1} GB/s to the device (copy engine)\n",
        ceilings.memory_read / 1e12,
        ceilings.host_to_device / 1e9
    )?;
    Ok(writeln!(out, "{}", columns(&rows(&report.kernels)).join("\n"))?)
}

fn rows(kernels: &[KernelTime]) -> Vec<Vec<String>> {
    let mut rows = vec![["kernel", "us", "floor us", "ratio", "figure"].map(str::to_owned).to_vec()];
    let optional = |number: Option<f64>, digits| number.map_or_else(String::new, |n| format!("{n:.digits$}"));
    rows.extend(kernels.iter().map(|time| {
        vec![
            time.kernel.clone(),
            format!("{:.2}", time.micros),
            optional(time.floor_micros, 2),
            optional(time.ratio, 3),
            time.figure.clone(),
        ]
    }));
    rows
}

impl Subject {
    fn open(args: &KernelsArgs, global: &GlobalArgs) -> CliResult<Self> {
        let (spec, _) = *args.shape.parts.clone();
        let resolved = resolve_on_gpu(global, Vec::new())?;
        let heads = Heads { head_dim: spec.head_dim, kv_heads: spec.kv_heads, group: spec.q_heads / spec.kv_heads };
        let Budget::Blocks(slots) = resolved.config.kv.budget_blocks else {
            return Err(CliError::input(
                "kv.budget_blocks: expected a number of blocks, found all",
                "leave it at its default, or name a number",
            ));
        };
        let failed = |error: oasis_core::policy::SpecError| CliError::Failure(error.to_string());
        let selector = resolved.config.selector.build().map_err(failed)?;
        let shape = HeadShape { group: heads.group, head_dim: heads.head_dim, block_tokens: BLOCK_TOKENS };
        let mut summarizers = Vec::new();
        for plugin in registry::plugins().iter().filter(|plugin| plugin.role == Role::Summarizer) {
            let kind = Layer::assignment("oasis bench", &format!("summarizer.kind=\"{}\"", plugin.kind))?;
            let summarizer = resolve_on_gpu(global, vec![kind])?.config.summarizer.build(shape).map_err(failed)?;
            if let Some(code) = summarizer.device_code() {
                summarizers.push((plugin.kind, code, summarizer.device_bytes(shape)));
            }
        }
        assemble::check_device(&resolved.config)?;
        let device = Device::open(resolved.config.device.ordinal)?;
        Ok(Self {
            bench: KernelBench::new(&device)?,
            ceilings: Ceilings::measure(&device)?,
            device,
            spec,
            heads,
            budget: (slots, selector.cap(slots).min(slots)),
            selector: (resolved.config.selector.typetag_name().to_owned(), selector.device_code()),
            summarizers,
        })
    }

    fn measure_decode(
        &self,
        (batch, context): (usize, usize),
        wanted: &dyn Fn(Kernel) -> bool,
        kernels: &mut Vec<KernelTime>,
    ) -> CliResult {
        let Self { bench, heads, budget: (slots, cap), .. } = self;
        let (heads, blocks) = (*heads, context / BLOCK_TOKENS);
        if wanted(Kernel::Sparse) {
            kernels.push(bench.time_attention(heads, QUERIES, batch, (*slots).min(blocks), false, None)?);
        }
        if wanted(Kernel::Dense) {
            kernels.push(bench.time_attention(heads, 1, batch, blocks, true, None)?);
        }
        if wanted(Kernel::Scan) {
            for (kind, code, bytes) in &self.summarizers {
                kernels.push(bench.time_scan(heads, QUERIES, (batch, blocks), kind, (*code, *bytes))?);
            }
        }
        if let (true, (kind, Some(code))) = (wanted(Kernel::Select), &self.selector) {
            kernels.push(bench.time_select(heads, (batch, blocks), (*slots, *cap), kind, *code)?);
        }
        if wanted(Kernel::Gather) && *cap > 0 {
            self.measure_gather((batch, blocks), kernels)?;
        }
        Ok(())
    }

    fn measure_gather(&self, (batch, blocks): (usize, usize), kernels: &mut Vec<KernelTime>) -> CliResult {
        let Self { bench, heads, budget: (slots, cap), summarizers, .. } = self;
        let options = gather_options(&self.device, heads.head_dim, None, None)?;
        let list = bench.gather(heads.head_dim, batch * heads.kv_heads * cap, self.ceilings.host_to_device)?;
        kernels.push(bench.time_gather(&list, options)?);
        let attention = bench.decode_attention(*heads, QUERIES, batch, (*slots).min(blocks), false)?;
        let Some((_, code, bytes)) = summarizers.iter().find(|(kind, ..)| *kind == "quest") else { return Ok(()) };
        let scan = bench.summary_scan(*heads, QUERIES, (batch, blocks), (*code, *bytes))?;
        // As in a step: the gather has multiprocessors of its own.
        let ctas = self.device.facts.multiprocessors.saturating_sub(options.ctas).max(1);
        kernels.push(bench.time_gather_beside(
            &list,
            options,
            &GatherBeside { attention: &attention, scan: &scan, ctas },
        )?);
        Ok(())
    }

    fn measure_linear(&self, batch: usize, kernels: &mut Vec<KernelTime>) -> CliResult {
        let gemms = Gemms::open(&self.device, GemmOptions::default())?;
        let spec = &self.spec;
        let (q, kv) = (spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let dense = |out, inner| GemmShape::dense(batch * QUERIES, out, inner);
        let mut layers = vec![("qkv", dense(q + 2 * kv, spec.hidden)), ("o", dense(spec.hidden, q))];
        if spec.moe.is_none() {
            layers.push(("gate_up", dense(2 * spec.intermediate, spec.hidden)));
            layers.push(("down", dense(spec.hidden, spec.intermediate)));
        }
        let logits = GemmShape { output: Output::F32, ..GemmShape::dense(batch, spec.vocab, spec.hidden) };
        layers.push(("logits", logits));
        for (name, shape) in layers {
            kernels.push(self.bench.time_linear(&gemms, name, &shape)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_stand_beside_their_floors_where_there_are_any() {
        let times = [
            KernelTime::new("scan", 66.0, Some(59.4), "4.1 TB/s"),
            KernelTime::new("select", 7.5, None, "bound by its launch"),
        ];
        let rows = rows(&times);
        assert_eq!(rows[1], ["scan", "66.00", "59.40", "0.900", "4.1 TB/s"]);
        assert_eq!(rows[2], ["select", "7.50", "", "", "bound by its launch"]);
    }
}
