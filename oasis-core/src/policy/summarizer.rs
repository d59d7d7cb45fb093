//! Summaries: a few rows that stand for a block's keys on the device.
//!
//! Rows are 32-bit words, which a summarizer fills as it likes: with one float a coordinate, several narrow numbers a
//! word, or scales beside them.

use super::{DeviceCode, SpecError};
use crate::geometry::HeadShape;
use serde::{Deserialize, Serialize};

/// How the scores of the query heads that share a KV head become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Aggregate {
    /// Sum over the group: agrees best with the next step's choice (0.933 against 0.894 on SmolLM2-135M).
    #[default]
    Sum,
    /// Maximum over the group.
    Max,
}

/// One block's keys to be summarised.
pub struct SummarizeTask<'a> {
    /// Keys after RoPE, `[blocks][block_tokens][head_dim]` of one KV head, every token valid.
    pub keys: &'a [f32],
    /// Receives `[blocks][rows_per_block][row_words]`.
    pub rows: &'a mut [u32],
}

/// One group query to be scored against the summaries of one KV head.
pub struct ScoreTask<'a> {
    /// Queries after RoPE, `[group][head_dim]`.
    pub query: &'a [f32],
    /// Summaries `[blocks][rows_per_block][row_words]`.
    pub summaries: &'a [u32],
    /// Receives one score a block, `[blocks]`.
    pub scores: &'a mut [f32],
}

/// Turns blocks of keys into summary rows and scores queries against them.
///
/// Obligations:
/// - `summarize` writes every element of `rows` and depends on nothing but the keys of the same block: rows are
///   computed once, when a block is complete, and never again.
/// - `score` writes one score a block, larger meaning more wanted, and is deterministic. A score of NaN ranks last.
/// - No row is ever made from a partial block or from the draft token.
pub trait Summarizer: Send + Sync {
    /// Summary rows of one block; at least 1.
    fn rows_per_block(&self) -> usize;

    /// 32-bit words of one row; at least 1. The default is one float a coordinate.
    fn row_words(&self, shape: HeadShape) -> usize {
        shape.head_dim
    }

    /// Summarises complete blocks.
    fn summarize(&self, shape: HeadShape, tasks: &mut [SummarizeTask<'_>]);

    /// Scores group queries against summaries; the scores of a group's query heads are joined by `aggregate`.
    fn score(&self, shape: HeadShape, aggregate: Aggregate, tasks: &mut [ScoreTask<'_>]);

    /// Device code with the same arithmetic, where the policy brings it.
    fn device_code(&self) -> Option<DeviceCode> {
        None
    }

    /// Bytes of a block's summary as the device code keeps it. The default is rows in bf16; rows of 8-bit codes take a
    /// byte a coordinate and two a row, rows of 4-bit codes half a byte and four for 32 of them; a number beside the rows
    /// takes four.
    fn device_bytes(&self, shape: HeadShape) -> usize {
        self.rows_per_block() * shape.head_dim * 2
    }
}

/// Configuration of a [`Summarizer`], found by its `kind`.
#[typetag::serde(tag = "kind")]
pub trait SummarizerSpec: std::fmt::Debug + Send + Sync {
    /// Builds the summarizer for heads of `shape`.
    ///
    /// # Errors
    /// Names the field that has an impossible value.
    fn build(&self, shape: HeadShape) -> Result<Box<dyn Summarizer>, SpecError>;
}
