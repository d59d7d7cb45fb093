//! GGUF files, versions 2 and 3 (specification: ggml-org/ggml `docs/gguf.md`).

mod cursor;
pub(crate) mod quant;
mod reader;
mod value;

pub(crate) use reader::Gguf;
