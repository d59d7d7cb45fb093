//! What sampling needs on the device, and what it cannot do.

use crate::device::{Device, DeviceBuffer, DeviceError};
use crate::kernels::Filter;
use oasis_core::sampling::SamplingParams;
use oasis_models::sampling::Sampler;

/// Working memory of the sampler.
pub(super) struct SamplerMemory {
    /// u64 `[rows]`, zero between launches.
    pub best: DeviceBuffer<u64>,
    /// u32 `[rows]`, zero between launches.
    pub arrived: DeviceBuffer<u32>,
    /// u64 `[rows]`: which tokens top-k and top-p left.
    pub cut: DeviceBuffer<u64>,
}

impl SamplerMemory {
    pub fn new(device: &Device, rows: usize) -> Result<Self, DeviceError> {
        Ok(Self { best: device.zeros(rows)?, arrived: device.zeros(rows)?, cut: device.zeros(rows)? })
    }
}

/// Why parameters cannot be used with a vocabulary of `vocab` tokens.
pub(super) fn refusal(sampling: SamplingParams, vocab: usize) -> Option<String> {
    if let Err(error) = Sampler::new(sampling) {
        return Some(error.to_string());
    }
    (filters(sampling) && vocab > Filter::MAX_VOCAB).then(|| {
        let most = Filter::MAX_VOCAB;
        format!(
            "sampling with top-k or top-p: expected a vocabulary of at most {most} tokens, found {vocab}\n  hint: \
             sampling.top_k = 0 and sampling.top_p = 1 keep all tokens"
        )
    })
}

/// Whether some token may be left out.
pub(super) fn filters(sampling: SamplingParams) -> bool {
    sampling.temperature > 0.0 && (sampling.top_k > 0 || sampling.top_p < 1.0)
}
