//! Draft heads: small networks that guess the next token from a decoder's hidden states.

mod eagle3;

pub use eagle3::{Eagle3Head, Eagle3Spec, Eagle3Weights};
