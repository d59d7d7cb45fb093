//! Checkpoints from files: one binary, as each would carry the embedded models.

mod common;
mod dequant;
mod garbage;
mod gguf_files;
mod gguf_writer;
mod heads;
mod safetensors_weights;
mod smollm2;
mod specs;
mod tokenizers;
