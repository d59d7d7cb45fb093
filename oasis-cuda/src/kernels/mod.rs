//! The kernels: their sources, shapes and parameters.
//!
//! A shape is a value such as [`Attention`]; it says what to compile ([`KernelSpec::unit`]) and how a launch looks.
//! Parameters are one struct a kernel, the same as `Params` in its source file, with the layout of every array.

mod append;
mod attention;
mod experts;
mod prefill;
mod rowwise;
mod sample;
mod scan;
mod select;
mod transfer;

pub use append::{Append, AppendParams, AppendPrompt, AppendPromptParams};
pub use attention::{Attention, AttentionParams};
pub use experts::{
    Combine, CombineParams, ExpertLayer, ExpertParams, ExpertStream, ExpertTiles, Route, RouteParams, SortPairs,
    SortPairsParams,
};
pub use prefill::{PrefillAttention, PrefillAttentionParams};
pub use rowwise::{
    Activation, ActivationParams, AddNorm, AddNormParams, Embed, EmbedParams, RandomWeights, RandomWeightsParams,
    Schedule, ScheduleParams, StepInput, Stream, StreamParams, Taps, TapsParams,
};
pub use sample::{Filter, FilterParams, Sample, SampleParams};
pub use scan::{Scan, ScanParams};
pub use select::{Select, SelectParams};
pub use transfer::{CopyList, EntryCopy, Gather, GatherParams};

use crate::compile::{SourceFile, Unit};

/// A place in memory that the device can read or write; 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Address(pub u64);

impl Address {
    /// No memory.
    pub const NONE: Self = Self(0);

    /// `bytes` further on.
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Parameters of a kernel, passed by value.
///
/// # Safety
/// The type is `repr(C)` and has the fields of `Params` in the kernel's source, in the same order and of the same sizes.
pub unsafe trait KernelParams: Copy {}

/// A kernel of a given shape.
pub trait KernelSpec {
    /// Parameters of a launch.
    type Params: KernelParams;
    /// Name of the function.
    const ENTRY: &'static str;

    /// What to compile.
    fn unit(&self) -> Unit;

    /// Threads of a CTA.
    fn threads(&self) -> u32;

    /// Dynamic shared memory of a CTA, in bytes.
    fn shared_bytes(&self) -> usize {
        0
    }
}

macro_rules! file {
    ($name:literal) => {
        $crate::compile::SourceFile { name: $name, text: include_str!(concat!("../../kernels/", $name)) }
    };
}
pub(crate) use file;

/// Headers that kernels and policies may include.
const HEADERS: [SourceFile; 11] = [
    file!("prelude.cuh"),
    file!("copy.cuh"),
    file!("experts.cuh"),
    file!("head.cuh"),
    file!("layout.cuh"),
    file!("logits.cuh"),
    file!("mma.cuh"),
    file!("tensor.cuh"),
    file!("transfer.cuh"),
    file!("wgmma.cuh"),
    file!("work.cuh"),
];

/// A unit of `source` and the common headers.
fn unit(source: SourceFile, defines: &[(&str, usize)]) -> Unit {
    let defines = defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
    Unit { source, headers: HEADERS.to_vec(), defines }
}

/// A unit into which `role` brings the file of a policy.
fn unit_with_policy(source: SourceFile, defines: &[(&str, usize)], role: &str, policy: SourceFile) -> Unit {
    let mut unit = unit(source, defines);
    unit.headers.push(policy);
    unit.defines.push(format!("{role}=\"{}\"", policy.name));
    unit
}

/// What CI compiles: every kernel in the shapes that need most registers, and in those of common models.
#[cfg(test)]
pub(crate) fn catalogue() -> Vec<Unit> {
    use oasis_core::policy::{DeviceCode, SelectorSpec, SummarizerSpec};
    let mut units = Vec::new();
    let file = |code: DeviceCode| SourceFile { name: code.name, text: code.source };
    let shape = oasis_core::geometry::HeadShape { group: 4, head_dim: 128, block_tokens: 16 };
    let summarizer = |spec: &dyn SummarizerSpec| {
        let built = spec.build(shape).expect("defaults are valid");
        (file(built.device_code().expect("a built-in policy has device code")), built.rows_per_block())
    };
    let summarizers =
        [summarizer(&oasis_policies::summarizers::Quest {}), summarizer(&oasis_policies::summarizers::Mean {})];
    let selector = oasis_policies::selectors::CappedLru::default().build().expect("defaults are valid");
    let selector = file(selector.device_code().expect("a built-in policy has device code"));
    for head_dim in [64, 128] {
        for queries in [1, 2] {
            for group in [1, 3, 4, 7, 8, 16] {
                for paged in [false, true] {
                    units.push(Attention { head_dim, group, queries, paged, stages: 2 }.unit());
                }
                for (summarizer, rows) in summarizers {
                    let query = queries - 1;
                    units.push(
                        Scan { head_dim, group, queries, query, max: group == 8, stages: 2, summarizer, rows }.unit(),
                    );
                }
            }
            units.extend(summarizers.map(|(summarizer, rows)| Append { head_dim, queries, summarizer, rows }.unit()));
            units.extend([Schedule { queries }.unit(), Embed { queries }.unit(), Taps { queries }.unit()]);
        }
        units.extend(summarizers.map(|(summarizer, _)| AppendPrompt { head_dim, summarizer }.unit()));
        for blocks in [1024, 2048, 4096, 16_384] {
            units.push(Select::for_blocks(head_dim, 128, blocks, selector).expect("few enough blocks").unit());
        }
        units.push(PrefillAttention { head_dim }.unit());
        units.extend([(16, 8), (10, 5), (2, 1)].map(|(stages, stores)| Gather { head_dim, stages, stores }.unit()));
    }
    units.extend([576, 4096, 16_384].map(|hidden| AddNorm { hidden }.unit()));
    for (experts, top, hidden, inter) in [(32, 4, 192, 128), (64, 8, 320, 192), (128, 8, 2048, 768)] {
        units.push(Route { experts, top }.unit());
        units.extend([false, true].map(|narrow| Combine { top, narrow }.unit()));
        for (out, inner, gated) in [(inter, hidden, true), (hidden, inter, false)] {
            let layer = ExpertLayer { experts, out, inner, gated };
            units.extend([ExpertStream(layer).unit(), ExpertTiles(layer).unit()]);
        }
    }
    units.extend([SortPairs.unit(), Activation.unit(), RandomWeights.unit()]);
    units.extend([Filter.unit(), Sample.unit(), Stream.unit()]);
    units
}
