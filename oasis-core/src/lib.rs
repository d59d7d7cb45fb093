//! Lookahead sparse decoding with the KV cache outside the device: the parts that know neither models nor devices.
//!
//! The device keeps, per layer and KV head, a small [working set](working_set) of KV blocks and a summary of every
//! block. While a step decodes, three background stages ([`pipeline`]) predict the next step's blocks, select what to
//! admit and move it. What they do is decided by the five roles of [`policy`] and [`memory`]: [`Summarizer`],
//! [`Predictor`], [`Selector`], [`Transport`] and [`KvStore`], each found by name through the [`registry`].
//!
//! [`Summarizer`]: policy::Summarizer
//! [`Predictor`]: policy::Predictor
//! [`Selector`]: policy::Selector
//! [`Transport`]: memory::Transport
//! [`KvStore`]: memory::KvStore

// The registration macro names this crate by its public path, here too.
extern crate self as oasis_core;

pub mod config;
pub mod engine;
pub mod executor;
pub mod geometry;
pub mod hand_over;
pub mod ids;
pub mod memory;
pub mod observer;
pub mod pipeline;
pub mod policy;
pub mod registry;
pub mod sampling;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;
pub mod working_set;

#[doc(hidden)]
pub use inventory;
