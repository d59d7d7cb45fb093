//! Measurements of speed beside their floors.

pub mod cpu;
pub mod gpu;
