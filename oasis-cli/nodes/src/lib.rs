//! Prefill and decode on separate nodes.
//!
//! A [`PrefillNode`] reads prompts, runs the first decode step, and keeps the KV in its store until the request ends or
//! its lease does. A [`DecodeExecutor`] takes requests over: it brings the working sets that the first step chose, or
//! everything, and fetches what later steps miss. A [`DecodeNode`] answers clients with it.

mod client;
mod decode;
mod facts;
mod io;
mod prefill;
mod reads;
mod serve;

pub use client::{NodeAnswer, NodeClient};
pub use decode::{DecodeExecutor, DecodeOptions, TransferMode};
pub use facts::{client_facts, node_facts};
pub use prefill::{PrefillNode, PrefillOptions, PrefillStatus};
pub use serve::{DecodeNode, DecodeStatus};
