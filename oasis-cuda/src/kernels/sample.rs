//! The next token of every row.

use super::rowwise::kernel;
use super::{Address, KernelParams, KernelSpec, file, unit};
use crate::compile::Unit;

/// Which tokens top-k and top-p leave; one CTA a row. A batch without either need not run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filter;

impl Filter {
    /// Most logits of a row.
    pub const MAX_VOCAB: usize = 1 << 18;
}

/// Parameters of [`Filter`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct FilterParams {
    /// f32 `[rows][vocab]`.
    pub logits: Address,
    /// f32 `[rows]`: 0 is greedy.
    pub temperature: Address,
    /// i32 `[rows]`: most tokens that are kept, 0 for all, 1 is greedy.
    pub top_k: Address,
    /// f32 `[rows]`, from 0 to 1: share of the weight that is kept, 1 for all.
    pub top_p: Address,
    /// u64 `[rows]`. Written, for [`SampleParams::cut`].
    pub cut: Address,
    /// Logits of a row, at most [`Filter::MAX_VOCAB`].
    pub vocab: i32,
}

// SAFETY: the fields are those of `Params` in the source file.
unsafe impl KernelParams for FilterParams {}

impl KernelSpec for Filter {
    type Params = FilterParams;
    const ENTRY: &'static str = "filter_logits";

    fn unit(&self) -> Unit {
        unit(file!("filter.cu"), &[])
    }

    fn threads(&self) -> u32 {
        1024
    }

    fn shared_bytes(&self) -> usize {
        // Places of the tokens in front.
        7168 * 8
    }
}

/// The next token of every row, greedy or drawn with a temperature; the grid is `[rows][ctas of a row]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample;

impl Sample {
    /// CTAs of a row: one wave of full multiprocessors, none with less than 16 logits a thread.
    pub fn ctas(&self, rows: usize, vocab: usize, multiprocessors: u32) -> u32 {
        let wave = 4 * multiprocessors as usize / rows.max(1);
        wave.min(vocab.div_ceil(512 * 16)).max(1) as u32
    }
}

/// Parameters of [`Sample`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct SampleParams {
    /// f32 `[rows][vocab]`.
    pub logits: Address,
    /// f32 `[rows]`: 0 is greedy.
    pub temperature: Address,
    /// u64 `[rows]`, which tokens [`Filter`] left: those whose `order << 32 | !token` is at least this, where `order` is
    /// the logit's place in IEEE 754's total order, counted from 0; 0 for all, `u64::MAX` is greedy. None leaves all.
    pub cut: Address,
    /// u64 `[rows]`.
    pub seed: Address,
    /// i32 `[rows]`.
    pub position: Address,
    /// u64 `[rows]`, zero between launches.
    pub best: Address,
    /// u32 `[rows]`, zero between launches.
    pub arrived: Address,
    /// i32 `[rows]`. Written: -1 where no logit is a number above negative infinity.
    pub token: Address,
    /// Logits of a row.
    pub vocab: i32,
}

kernel!(Sample, SampleParams, "sample.cu", "sample_tokens", |_| 512, |_| Vec::new());
