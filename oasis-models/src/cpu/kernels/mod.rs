//! Kernels of the CPU executor: plain functions over f32 slices, layouts in brackets, sizes in elements.
//!
//! Decode kernels are *batch invariant*: the values of one row are bit-identical whatever other rows are in the call and
//! however many threads run it. Every output element is accumulated in an order that depends on its own inputs alone.

mod activation;
mod decode_attention;
mod matmul;
mod matvec;
mod norm;
mod prefill_attention;
mod rotate;
mod simd;
#[cfg(test)]
pub(in crate::cpu) mod testing;

pub use activation::swiglu;
pub use decode_attention::{KvRun, decode_attention};
pub use matmul::{matmul, widen};
pub use matvec::matvec;
pub use norm::{rms_norm, rms_norm_heads, rms_norm_in_place};
pub use prefill_attention::{PrefillShape, prefill_attention};
pub(super) use rotate::rotate;
