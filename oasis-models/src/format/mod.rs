//! File formats, apart from what models are made of: safetensors and GGUF containers, element types, JSON objects.

pub(crate) mod bytes;
pub(crate) mod dtype;
pub(crate) mod error;
pub(crate) mod gguf;
pub(crate) mod map;
pub(crate) mod safetensors;
pub(crate) mod table;
