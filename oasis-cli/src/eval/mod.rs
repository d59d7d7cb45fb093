//! Measurements of policies on real models.

pub mod agreement;
pub mod coverage;
pub mod device;
pub mod divergence;
pub mod logits;
pub mod meter;
pub mod observed;
pub mod perplexity;
pub mod recall;
pub mod running;
pub mod setting;
pub mod statistics;
pub mod tasks;
pub mod turnover;
pub mod window;

#[cfg(test)]
pub mod tests;
