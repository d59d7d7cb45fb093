//! A model ready to run on the CPU, shared by executors.

use crate::cpu::decoder::Decoder;
use crate::cpu::eagle3::DraftHead;
use crate::draft::Eagle3Head;
use crate::spec::DecoderSpec;
use crate::weights::DecoderWeights;
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

    /// Whether there is a draft head.
    pub fn has_draft(&self) -> bool {
        self.draft.is_some()
    }
}
