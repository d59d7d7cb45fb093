//! Checkpoints, tokenizers, decoder families, EAGLE-3 draft heads and the CPU executor of OasisKV.

pub mod checkpoint;
pub mod cpu;
pub mod draft;
mod format;
pub mod rope;
pub mod sampling;
pub mod shapes;
pub mod spec;
pub mod tokenizer;
pub mod weights;
