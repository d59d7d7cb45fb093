//! The kernels: their sources, shapes and parameters.
//!
//! A shape is a value such as [`Attention`]; it says what to compile ([`KernelSpec::unit`]) and how a launch looks.
//! Parameters are one struct a kernel, the same as `Params` in its source file, with the layout of every array.

mod append;
mod attention;
mod correct;
mod experts;
mod hash;
mod linear;
mod prefill;
mod rowwise;
mod sample;
mod scan;
mod select;
mod transfer;

pub use append::{Append, AppendParams, AppendPrompt, AppendPromptParams};
pub use attention::{Attention, AttentionParams};
pub use correct::{Correct, CorrectParams};
pub use experts::{
    Combine, CombineParams, ExpertLayer, ExpertParams, ExpertStream, ExpertTiles, Route, RouteParams, SortPairs,
    SortPairsParams,
};
pub use hash::{HashScores, HashScoresParams};
pub use linear::{LinearStream, LinearStreamParams};
pub use prefill::{PrefillAttention, PrefillAttentionParams};
pub use rowwise::{
    Activation, ActivationParams, AddNorm, AddNormParams, Embed, EmbedParams, RandomWeights, RandomWeightsParams,
    Schedule, ScheduleParams, StepInput, Stream, StreamParams, Taps, TapsParams,
};
pub use sample::{Filter, FilterParams, Sample, SampleParams};
pub use scan::{Scan, ScanParams};
pub use select::{Select, SelectParams};
pub use transfer::{CopyList, EntryCopy, Gather, GatherParams, LinkStamps};

use crate::compile::{SourceFile, Unit};
use oasis_core::policy::DeviceCode;

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
    /// Whether a launch may begin while the kernel before it on the stream still runs: all its CTAs wait for that one's
    /// end before they touch what it, or any before, wrote or read.
    const WAITS: bool = false;

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
        $crate::compile::SourceFile {
            name: std::borrow::Cow::Borrowed($name),
            text: include_str!(concat!("../../kernels/", $name)),
        }
    };
}
pub(crate) use file;

/// Headers that kernels and policies may include.
const HEADERS: [SourceFile; 16] = [
    file!("prelude.cuh"),
    file!("cluster.cuh"),
    file!("copy.cuh"),
    file!("experts.cuh"),
    file!("hash.cuh"),
    file!("head.cuh"),
    file!("layout.cuh"),
    file!("logits.cuh"),
    file!("mma.cuh"),
    file!("optional.cuh"),
    file!("overlap.cuh"),
    file!("summary.cuh"),
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

/// A unit into which `role` brings the code of a policy.
fn unit_with_policy(source: SourceFile, defines: &[(&str, usize)], role: &str, policy: DeviceCode) -> Unit {
    let mut unit = unit(source, defines);
    // In a folder of their own: a policy's file may have the name of a kernel's.
    let name = format!("policy/{}", policy.name);
    unit.defines.push(format!("{role}=\"{name}\""));
    unit.headers.push(SourceFile { name: name.into(), text: policy.source });
    unit.defines.extend(policy.constant.map(|value| format!("POLICY_CONSTANT={value:#x}ull")));
    unit
}

/// What CI compiles: every kernel in the shapes that need most registers, and in those of common models.
#[cfg(test)]
pub(crate) fn catalogue() -> Vec<Unit> {
    use oasis_core::policy::{SelectorSpec, SummarizerSpec};
    use oasis_policies::{selectors, summarizers};
    let mut units = Vec::new();
    let shape = |head_dim| oasis_core::geometry::HeadShape { group: 4, head_dim, block_tokens: 16 };
    let summarizer = |spec: &dyn SummarizerSpec, head_dim| {
        let built = spec.build(shape(head_dim)).expect("defaults are valid");
        (built.device_code().expect("it has device code"), built.device_bytes(shape(head_dim)))
    };
    let summarizers: [Box<dyn SummarizerSpec>; 7] = [
        Box::new(summarizers::Quest {}),
        Box::new(summarizers::Mean {}),
        Box::new(summarizers::QuestFp8 {}),
        Box::new(summarizers::QuestInt4 {}),
        Box::new(summarizers::ArkVale::default()),
        Box::new(summarizers::ArkVale { volume: summarizers::Volume::Sphere }),
        Box::new(summarizers::ShadowKv::default()),
    ];
    let selectors: [Box<dyn SelectorSpec>; 3] = [
        Box::new(selectors::CappedLru::default()),
        Box::new(selectors::Hysteresis::default()),
        Box::new(selectors::Lfu::default()),
    ];
    let selectors = selectors.map(|spec| spec.build().expect("defaults are valid").device_code().expect("it has code"));
    for head_dim in [64, 128] {
        let summarizers = summarizers.iter().map(|spec| summarizer(&**spec, head_dim)).collect::<Vec<_>>();
        for queries in [1, 2] {
            for group in [1, 3, 4, 7, 8, 16] {
                for paged in [false, true] {
                    units.push(Attention { head_dim, group, queries, paged, stages: 2 }.unit());
                }
                units.push(HashScores { head_dim, group, queries, query: queries - 1 }.unit());
                if queries == 1 {
                    units.push(Correct { head_dim, group }.unit());
                }
                for (summarizer, bytes) in summarizers.iter().copied() {
                    let (query, stages) = (queries - 1, Scan::stages(bytes));
                    units.push(
                        Scan { head_dim, group, queries, query, max: group == 8, stages, summarizer, bytes }.unit(),
                    );
                }
            }
            let append = |&(summarizer, bytes)| Append { head_dim, queries, summarizer, bytes }.unit();
            units.extend(summarizers.iter().map(append));
            units.extend([Schedule { queries }.unit(), Embed { queries }.unit(), Taps { queries }.unit()]);
        }
        let append = |&(summarizer, bytes)| AppendPrompt { head_dim, summarizer, bytes }.unit();
        units.extend(summarizers.iter().map(append));
        for blocks in [1024, 2048, 4096, 8192, 16_384] {
            let shape = |selector| Select::for_blocks(head_dim, 128, blocks, selector).expect("few enough blocks");
            units.extend(selectors.iter().map(|selector| shape(*selector).unit()));
            units.push(Select { follows_link: true, ..shape(selectors[0]) }.unit());
        }
        units.push(PrefillAttention { head_dim }.unit());
        for timed in [false, true] {
            let gather = |(stages, stores)| Gather { head_dim, stages, stores, timed }.unit();
            units.extend([(16, 8), (10, 5), (2, 1)].map(gather));
        }
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
    for columns in [8, 16, 32, 64] {
        units.extend([64, 128].map(|tile| LinearStream { columns, tile }.unit()));
    }
    units.extend([SortPairs.unit(), Activation.unit(), RandomWeights.unit()]);
    units.extend([Filter.unit(), Sample.unit(), Stream.unit()]);
    units
}
