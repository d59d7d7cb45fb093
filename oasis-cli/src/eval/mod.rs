//! Measurements of policies on real models.

pub mod agreement;
pub mod coverage;
pub mod meter;
pub mod recall;
pub mod statistics;
pub mod tasks;
