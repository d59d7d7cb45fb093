//! Requests and what becomes of them.

use crate::ids::{RequestId, TokenId};
use crate::sampling::SamplingParams;

/// What a caller wants generated.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// Prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate, at least 1.
    pub max_new_tokens: usize,
    /// Tokens that end the answer; the one that did is still reported.
    pub stop_tokens: Vec<TokenId>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
}

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestState {
    /// For room on the device or in the store.
    Waiting,
    /// Its prompt is being read.
    Prefilling,
    /// It generates.
    Decoding,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token came.
    Stop,
    /// It has all the tokens it asked for.
    Length,
}

/// Something that happened to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A chunk of the prompt was read.
    Prefill {
        /// Request.
        request: RequestId,
        /// Token-layers done.
        done: usize,
        /// Token-layers in all.
        total: usize,
    },
    /// A token was generated.
    Token {
        /// Request.
        request: RequestId,
        /// Token.
        token: TokenId,
    },
    /// The request is done.
    Finished {
        /// Request.
        request: RequestId,
        /// Why.
        reason: FinishReason,
    },
    /// The device or the store is too small for the request, even with nothing else running, or its sampling parameters
    /// are impossible.
    Refused {
        /// Request.
        request: RequestId,
        /// What there is too little of, or which parameter is out of range, with the numbers.
        reason: String,
    },
    /// The request could not go on.
    Failed {
        /// Request.
        request: RequestId,
        /// Why, in one sentence.
        error: String,
    },
}

/// A request that decodes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Running {
    pub request: RequestId,
    /// Token to run next.
    pub next: TokenId,
    /// Tokens reported so far.
    pub generated: usize,
    /// It leaves the batch at the end of the current step.
    pub ended: bool,
}
