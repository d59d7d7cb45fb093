//! Small kernels that work row by row, and the stream that measures the memory.

use super::{Address, KernelParams, KernelSpec, file, unit};
use crate::compile::Unit;

/// Implements [`KernelSpec`] for a kernel of one source file with a fixed number of threads.
macro_rules! kernel {
    ($shape:ident, $params:ident, $file:literal, $entry:literal, $threads:expr, $defines:expr) => {
        kernel!($shape, $params, $file, $entry, false, $threads, $defines);
    };
    ($shape:ident, $params:ident, $file:literal, $entry:literal, $waits:literal, $threads:expr, $defines:expr) => {
        // SAFETY: the fields are those of `Params` in the source file.
        unsafe impl KernelParams for $params {}

        impl KernelSpec for $shape {
            type Params = $params;
            const ENTRY: &'static str = $entry;
            const WAITS: bool = $waits;

            fn unit(&self) -> Unit {
                let defines: fn(&Self) -> Vec<(&'static str, usize)> = $defines;
                unit(file!($file), &defines(self))
            }

            fn threads(&self) -> u32 {
                let threads: fn(&Self) -> u32 = $threads;
                threads(self)
            }
        }
    };
}
pub(super) use kernel;

/// What every layer of a step works on, from the positions; one CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// Query tokens of a request.
    pub queries: usize,
}

/// A request of a step, written by the host in mapped memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct StepInput {
    /// Token to run.
    pub token: i32,
    /// Its position; -1 for padding.
    pub position: i32,
}

/// Parameters of [`Schedule`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ScheduleParams {
    /// [`StepInput`] `[requests]`, usually in mapped host memory.
    pub inputs: Address,
    /// i32 `[requests]`. Written.
    pub token: Address,
    /// i32 `[requests]`. Written: position of the first query token; -1 for padding.
    pub position: Address,
    /// i32 `[requests]`. Written: position of the newest token whose block may be ranked.
    pub ranked: Address,
    /// i32 `[requests + 1]`. Written: entries of a KV head, tail included, before each request.
    pub entry_start: Address,
    /// i32 `[requests + 1]`. Written: summary tiles of a KV head before each request.
    pub tile_start: Address,
    /// i32 `[requests]`. Written: complete blocks to be ranked.
    pub blocks: Address,
    /// i32 `[requests]`. Written: position of the draft head's row; -1 for padding.
    pub draft_position: Address,
    /// i32 `[requests + 1]`. Written: entries of a KV head of the draft head before each request.
    pub draft_entry_start: Address,
    /// u32 `[1]`. Counted up.
    pub step: Address,
    /// Requests, at most 1,024.
    pub requests: i32,
    /// Entries of a KV head that stay on the device.
    pub slots: i32,
    /// Newest blocks of its own KV that the draft head attends to.
    pub draft_blocks: i32,
    /// 0: blocks that this step completes are ranked; 1: only those complete before it.
    pub lag: i32,
}

kernel!(Schedule, ScheduleParams, "schedule.cu", "schedule_step", |_| 1024, |shape| vec![("QUERIES", shape.queries)]);

/// `residual += x`, then RMSNorm; one CTA a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddNorm {
    /// Elements of a row, a multiple of 8.
    pub hidden: usize,
}

impl AddNorm {
    /// Groups of 8 elements that a thread holds.
    fn items(&self) -> usize {
        self.hidden.div_ceil(8 * 1024)
    }
}

/// Parameters of [`AddNorm`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AddNormParams {
    /// bf16 `[rows][hidden]`. Updated where there is `x`.
    pub residual: Address,
    /// bf16 `[rows][hidden]`; none to add nothing.
    pub x: Address,
    /// bf16 `[hidden]`.
    pub weight: Address,
    /// bf16 `[rows][out_stride]`. Written.
    pub out: Address,
    /// Elements of a row, a multiple of 8.
    pub hidden: i32,
    /// Elements from one row of `out` to the next, a multiple of 8.
    pub out_stride: i32,
    /// Epsilon.
    pub eps: f32,
}

kernel!(
    AddNorm,
    AddNormParams,
    "norm.cu",
    "add_rms_norm",
    true,
    |shape| shape.hidden.div_ceil(8 * shape.items()).next_multiple_of(32) as u32,
    |shape| vec![("ITEMS", shape.items())]
);

/// `silu(gate) * up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activation;

impl Activation {
    /// CTAs for `rows` rows of `width` elements.
    pub fn ctas(&self, rows: usize, width: usize) -> u32 {
        (rows * width / 8).div_ceil(256) as u32
    }
}

/// Parameters of [`Activation`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ActivationParams {
    /// bf16 `[rows][2][width]`: the gates of a row, then its ups.
    pub gate_up: Address,
    /// bf16 `[rows][width]`. Written.
    pub out: Address,
    /// Rows.
    pub rows: i32,
    /// Elements of a row, a multiple of 8.
    pub width: i32,
}

kernel!(Activation, ActivationParams, "activation.cu", "swiglu", true, |_| 256, |_| Vec::new());

/// Rows of the embedding; one CTA a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Embed {
    /// Rows of a request: 1, or 2 with a draft token.
    pub queries: usize,
}

/// Parameters of [`Embed`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct EmbedParams {
    /// bf16 `[vocab][hidden]`.
    pub table: Address,
    /// i32 `[requests]`.
    pub tokens: Address,
    /// i32 `[requests]`, ids of the draft vocabulary; unused without draft tokens.
    pub draft_tokens: Address,
    /// i32 `[draft_vocab]`: token of the target a draft id; none where both vocabularies are one.
    pub target_ids: Address,
    /// bf16 `[requests * queries][hidden]`. Written.
    pub out: Address,
    /// Elements of a row, a multiple of 8.
    pub hidden: i32,
}

kernel!(Embed, EmbedParams, "embed.cu", "embed_tokens", |_| 256, |shape| vec![("QUERIES", shape.queries)]);

/// Keeps the hidden states that the draft head reads; one CTA a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taps {
    /// Rows of a request.
    pub queries: usize,
}

/// Parameters of [`Taps`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct TapsParams {
    /// bf16 `[requests * queries][hidden]`.
    pub residual: Address,
    /// i32 `[requests]`; -1 for padding, whose states are left alone.
    pub position: Address,
    /// bf16 `[requests][3][hidden]`, at the tap to be written. Written.
    pub taps: Address,
    /// Elements of a row, a multiple of 8.
    pub hidden: i32,
}

kernel!(Taps, TapsParams, "taps.cu", "keep_taps", |_| 256, |shape| vec![("QUERIES", shape.queries)]);

/// Weights of a model of which only the shape matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomWeights;

/// Parameters of [`RandomWeights`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RandomWeightsParams {
    /// bf16 pairs `[pairs]`. Written.
    pub data: Address,
    /// Pairs of elements.
    pub pairs: u64,
    /// Which numbers.
    pub seed: u64,
    /// They lie between `-width` and `width`.
    pub width: f32,
    /// Bits of a pair that are kept.
    pub mask: u32,
}

kernel!(RandomWeights, RandomWeightsParams, "random.cu", "fill_random", |_| 512, |_| Vec::new());

/// Reads memory as fast as it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream;

/// Parameters of [`Stream`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct StreamParams {
    /// 16-byte units `[count]`.
    pub data: Address,
    /// Units.
    pub count: u64,
    /// u32 `[1]`.
    pub sum: Address,
}

kernel!(Stream, StreamParams, "stream.cu", "read_stream", |_| 512, |_| Vec::new());
