//! Element types of stored tensors, and their conversion to f32.

use half::{bf16, f16};

use super::gguf::quant;

/// How the elements of a stored tensor are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names of the GGUF specification")]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// Brain float.
    Bf16,
    /// 64-bit signed integer, for id tables.
    I64,
    /// 32-bit signed integer, for id tables.
    I32,
    /// One byte a flag.
    Bool,
    /// GGUF: 32 elements, f16 scale, 8-bit.
    Q8_0,
    /// GGUF: 32 elements, f16 scale, 4-bit.
    Q4_0,
    /// GGUF: 32 elements, f16 scale and minimum, 4-bit.
    Q4_1,
    /// GGUF: 32 elements, f16 scale, 5-bit.
    Q5_0,
    /// GGUF: 32 elements, f16 scale and minimum, 5-bit.
    Q5_1,
    /// GGUF: 256 elements in 8 groups with 6-bit scales and minima, 4-bit.
    Q4_K,
    /// GGUF: as `Q4_K` with 5 bits an element.
    Q5_K,
    /// GGUF: 256 elements in 16 groups with 8-bit scales, 6-bit.
    Q6_K,
}

impl Dtype {
    /// Elements and bytes of one block; plain types have blocks of one element.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 | Self::I32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::I64 => (1, 8),
            Self::Bool => (1, 1),
            Self::Q8_0 => (32, 34),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q4_K => (256, 144),
            Self::Q5_K => (256, 176),
            Self::Q6_K => (256, 210),
        }
    }

    /// Bytes of `elements` elements; `None` when they do not fill whole blocks or the product overflows.
    pub fn bytes(self, elements: usize) -> Option<usize> {
        let (block, bytes) = self.block();
        elements.is_multiple_of(block).then(|| (elements / block).checked_mul(bytes)).flatten()
    }

    /// Holds numbers that can serve as weights.
    pub fn is_float(self) -> bool {
        !matches!(self, Self::I64 | Self::I32 | Self::Bool)
    }

    /// Loses nothing when kept in bf16, or was quantised far below it.
    pub(crate) fn fits_bf16(self) -> bool {
        self.is_float() && !matches!(self, Self::F32 | Self::F16)
    }

    /// Name as file formats write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::Bool => "BOOL",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// Decodes whole blocks to f32.
    ///
    /// `raw` must hold exactly the blocks of `out.len()` elements, which `Dtype::bytes` gives; both are cut to the
    /// shorter of the two otherwise. Integer types give zeros: callers check [`Dtype::is_float`] first.
    pub fn decode(self, raw: &[u8], out: &mut [f32]) {
        let (elements, bytes) = self.block();
        let blocks = raw.chunks_exact(bytes).zip(out.chunks_exact_mut(elements));
        match self {
            Self::F32 => plain(raw, out, f32::from_le_bytes),
            Self::F16 => plain(raw, out, |raw| f16::from_le_bytes(raw).to_f32()),
            Self::Bf16 => plain(raw, out, |raw| bf16::from_le_bytes(raw).to_f32()),
            Self::Q8_0 => blocks.for_each(|(raw, out)| quant::q8_0(raw, out)),
            Self::Q4_0 => blocks.for_each(|(raw, out)| quant::q4_0(raw, out)),
            Self::Q4_1 => blocks.for_each(|(raw, out)| quant::q4_1(raw, out)),
            Self::Q5_0 => blocks.for_each(|(raw, out)| quant::q5_0(raw, out)),
            Self::Q5_1 => blocks.for_each(|(raw, out)| quant::q5_1(raw, out)),
            Self::Q4_K => blocks.for_each(|(raw, out)| quant::q4_k(raw, out)),
            Self::Q5_K => blocks.for_each(|(raw, out)| quant::q5_k(raw, out)),
            Self::Q6_K => blocks.for_each(|(raw, out)| quant::q6_k(raw, out)),
            Self::I64 | Self::I32 | Self::Bool => out.fill(0.0),
        }
    }
}

/// Decodes elements of `N` bytes.
fn plain<const N: usize>(raw: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    for (out, raw) in out.iter_mut().zip(raw.as_chunks().0) {
        *out = decode(*raw);
    }
}
