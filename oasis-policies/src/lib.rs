//! Built-in summarizers, predictors and selectors of OasisKV, one file a kind.
//!
//! A program that wants them by name links this crate: `use oasis_policies as _;`.

pub mod predictors;
pub mod selectors;
pub mod summarizers;
