//! Transports: how planned entries move between two memories.

mod memcpy;

pub use memcpy::Memcpy;
