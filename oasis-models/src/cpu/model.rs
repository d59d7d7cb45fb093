//! A model ready to run on the CPU, shared by executors.

use crate::cpu::decoder::Decoder;
use crate::cpu::eagle3::DraftHead;
use crate::draft::Eagle3Head;
use crate::spec::DecoderSpec;
use crate::weights::{DecoderWeights, LayerWeights};
use std::sync::Arc;

/// A decoder and, where there is one, its draft head.
pub struct CpuModel {
    pub(super) decoder: Decoder,
    pub(super) draft: Option<DraftHead>,
}

impl CpuModel {
    /// Takes a decoder's weights and a head that was checked against the decoder when it was loaded.
    pub fn new(spec: DecoderSpec, weights: DecoderWeights, draft: Option<Arc<Eagle3Head>>) -> Self {
        let draft = draft.map(|head| DraftHead::new(head, spec.layers));
        Self { decoder: Decoder::new(spec, weights), draft }
    }

    /// The decoder's shape and arithmetic.
    pub fn spec(&self) -> &DecoderSpec {
        &self.decoder.spec
    }

    /// Bytes of weights that a decode step of one row reads: all layers with every expert, and the output projection.
    pub fn step_weight_bytes(&self) -> u64 {
        let weights = &self.decoder.weights;
        let head = weights.lm_head.as_ref().unwrap_or(&weights.embed);
        weights.layers.iter().map(LayerWeights::matrix_bytes).sum::<u64>() + head.bytes()
    }

    /// Bytes of weights that one draft step reads; 0 without a head.
    pub fn draft_weight_bytes(&self) -> u64 {
        self.draft.as_ref().map_or(0, DraftHead::weight_bytes)
    }

    /// Whether there is a draft head.
    pub fn has_draft(&self) -> bool {
        self.draft.is_some()
    }
}
