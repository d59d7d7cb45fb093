//! The choice of the next tokens.

use super::parts::{Parts, Work};
use super::sampler::SamplerMemory;
use crate::device::DeviceError;
use crate::kernels::{Address, FilterParams, Sample, SampleParams};

/// Tokens to be chosen.
pub(super) struct Choice<'a> {
    pub memory: &'a SamplerMemory,
    pub rows: usize,
    /// The first row in the tables of sampling parameters; `None` is greedy.
    pub first: Option<usize>,
    /// f32 `[rows][vocab]`.
    pub logits: Address,
    pub vocab: usize,
    /// i32 `[rows]`.
    pub position: Address,
    /// i32 `[rows]`. Written.
    pub token: Address,
}

impl Parts {
    /// Queues the choice of the next token of every row.
    pub fn choose(&self, work: &Work<'_>, choice: &Choice<'_>) -> Result<(), DeviceError> {
        let Choice { memory, rows, first, logits, vocab, .. } = *choice;
        let shared = &self.memory.shared;
        let row = first.unwrap_or(0);
        let temperature = match first {
            Some(row) => shared.temperatures_address().offset(row * 4),
            None => self.memory.greedy.address(),
        };
        let mut cut = Address::NONE;
        if first.is_some() && shared.filters(row, rows) {
            cut = memory.cut.address();
            let params = FilterParams {
                logits,
                temperature,
                top_k: shared.top_k_address().offset(row * 4),
                top_p: shared.top_p_address().offset(row * 4),
                cut,
                vocab: vocab as i32,
            };
            // SAFETY: all arrays are sized for all rows; requests with larger vocabularies are refused.
            unsafe { self.programs.filter.launch(work.stream, (rows as u32, 1), &params)? };
        }
        let params = SampleParams {
            logits,
            temperature,
            cut,
            seed: shared.seeds_address().offset(row * 8),
            position: choice.position,
            best: memory.best.address(),
            arrived: memory.arrived.address(),
            token: choice.token,
            vocab: vocab as i32,
        };
        let ctas = Sample.ctas(rows, vocab, self.device.facts.multiprocessors);
        // SAFETY: all arrays are sized for all rows.
        unsafe { self.programs.sample.launch(work.stream, (ctas, rows as u32), &params) }
    }
}
