//! The engine: continuous batching of requests over an [`Executor`].
//!
//! Requests wait until device and store have room, prefill one chunk at a time between decode steps of the others,
//! then decode together; each may join, finish, fail or be cancelled at any step.

mod request;

pub use request::{Event, FinishReason, GenerateRequest, RequestState};

use crate::executor::{Admission, DecodeRow, Executor, PrefillProgress, Sequence};
use crate::ids::{RequestId, TokenId};
use request::Running;
use std::collections::VecDeque;

/// Why a request is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// No prompt.
    #[error("the prompt is empty: expected at least one token, found none")]
    EmptyPrompt,
    /// A token the model does not know.
    #[error("token {token} is not in the vocabulary: expected an id below {vocab}")]
    UnknownToken {
        /// Token.
        token: TokenId,
        /// Vocabulary size.
        vocab: usize,
    },
    /// Prompt and answer do not fit the model.
    #[error(
        "the context is too long: expected at most {max_context} tokens, found {prompt} of prompt and {max_new_tokens} \
         to generate; shorten the prompt or generate fewer tokens"
    )]
    TooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Tokens to generate.
        max_new_tokens: usize,
        /// The model's limit.
        max_context: usize,
    },
    /// Nothing to do.
    #[error("expected at least one token to generate, found 0")]
    NothingToGenerate,
}

/// Batches requests over an executor.
pub struct Engine<E> {
    executor: E,
    max_batch: usize,
    next_request: u64,
    waiting: VecDeque<Sequence>,
    stops: Vec<(RequestId, GenerateRequest)>,
    /// Requests whose prompts are being read: as many as the executor wants to interleave.
    prefilling: Vec<RequestId>,
    running: Vec<Running>,
}

impl<E: Executor> Engine<E> {
    /// An engine that decodes at most `max_batch` requests together.
    pub fn new(executor: E, max_batch: usize) -> Self {
        Self {
            executor,
            max_batch: max_batch.max(1),
            next_request: 1,
            waiting: VecDeque::new(),
            stops: Vec::new(),
            prefilling: Vec::new(),
            running: Vec::new(),
        }
    }

    /// The executor.
    pub fn executor(&self) -> &E {
        &self.executor
    }

    /// The executor, for measurements between requests.
    pub fn executor_mut(&mut self) -> &mut E {
        &mut self.executor
    }

    /// Takes a request; it starts at a later [`step`](Self::step).
    ///
    /// # Errors
    /// When the request can never run on this model.
    pub fn submit(&mut self, request: GenerateRequest) -> Result<RequestId, SubmitError> {
        let info = self.executor.info();
        if request.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if request.max_new_tokens == 0 {
            return Err(SubmitError::NothingToGenerate);
        }
        if let Some(&token) = request.prompt.iter().find(|t| t.index() >= info.vocab) {
            return Err(SubmitError::UnknownToken { token, vocab: info.vocab });
        }
        // The last token is returned but never run.
        if request.prompt.len().saturating_add(request.max_new_tokens - 1) > info.max_context {
            return Err(SubmitError::TooLong {
                prompt: request.prompt.len(),
                max_new_tokens: request.max_new_tokens,
                max_context: info.max_context,
            });
        }
        let id = RequestId(self.next_request);
        self.next_request += 1;
        self.waiting.push_back(Sequence {
            request: id,
            prompt: request.prompt.clone(),
            max_new_tokens: request.max_new_tokens,
            sampling: request.sampling,
        });
        self.stops.push((id, request));
        Ok(id)
    }

    /// Where a request is; `None` when it has ended or never was.
    pub fn state(&self, request: RequestId) -> Option<RequestState> {
        if self.waiting.iter().any(|s| s.request == request) {
            Some(RequestState::Waiting)
        } else if self.prefilling.contains(&request) {
            Some(RequestState::Prefilling)
        } else if self.running.iter().any(|r| r.request == request) {
            Some(RequestState::Decoding)
        } else {
            None
        }
    }

    /// Ends a request in whatever state it is; `false` when it has ended already.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let Some(state) = self.state(request) else { return false };
        match state {
            RequestState::Waiting => self.waiting.retain(|s| s.request != request),
            RequestState::Prefilling => self.prefilling.retain(|r| *r != request),
            RequestState::Decoding => self.running.retain(|r| r.request != request),
        }
        self.forget(request);
        true
    }

    /// Whether nothing waits or runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.prefilling.is_empty() && self.running.is_empty()
    }

    /// Requests that decode together now.
    pub fn batch(&self) -> usize {
        self.running.len()
    }

    /// Does one unit of work: a chunk of each prefill, then a decode step of everything that decodes.
    ///
    /// # Errors
    /// When the device is lost; every request has then ended.
    pub fn step(&mut self) -> anyhow::Result<Vec<Event>> {
        let mut events = Vec::new();
        let result = self.read_prompts(&mut events).and_then(|()| self.decode(0, &mut events));
        if let Err(error) = result {
            self.abandon_all();
            return Err(error);
        }
        Ok(events)
    }

    fn admit(&mut self, events: &mut Vec<Event>) -> anyhow::Result<()> {
        while self.prefilling.len() < self.executor.prompts_at_once()
            && self.prefilling.len() + self.running.len() < self.max_batch
        {
            let Some(sequence) = self.waiting.front() else { break };
            let request = sequence.request;
            match self.executor.admit(sequence.clone())? {
                Admission::Admitted => {
                    self.waiting.pop_front();
                    self.prefilling.push(request);
                }
                Admission::Wait { .. } if !(self.running.is_empty() && self.prefilling.is_empty()) => break,
                // Nothing runs that could give memory back, so waiting would be forever.
                Admission::Wait { reason } | Admission::Refused { reason } => {
                    self.waiting.pop_front();
                    events.push(Event::Refused { request, reason });
                    self.forget(request);
                }
            }
        }
        Ok(())
    }

    /// Admits and reads; where requests begin alone, those that have been read run a step, and others take their turn.
    fn read_prompts(&mut self, events: &mut Vec<Event>) -> anyhow::Result<()> {
        loop {
            self.admit(events)?;
            let before = self.running.len();
            self.advance_prefills(events);
            if self.running.len() == before || !self.executor.begins_alone() {
                return Ok(());
            }
            self.decode(before, events)?;
        }
    }

    fn advance_prefills(&mut self, events: &mut Vec<Event>) {
        for request in std::mem::take(&mut self.prefilling) {
            match self.executor.prefill(request) {
                Ok(PrefillProgress::Running { done, total }) => {
                    self.prefilling.push(request);
                    events.push(Event::Prefill { request, done, total });
                }
                Ok(PrefillProgress::Done(token)) => {
                    self.running.push(Running { request, next: token, generated: 0, ended: false });
                    self.deliver(self.running.len() - 1, token, events);
                    self.running.retain(|r| !r.ended);
                }
                Err(error) => self.fail(request, error.to_string(), events),
            }
        }
    }

    /// Decodes what runs from place `first` on.
    fn decode(&mut self, first: usize, events: &mut Vec<Event>) -> anyhow::Result<()> {
        if self.running.len() <= first {
            return Ok(());
        }
        let rows: Vec<DecodeRow> =
            self.running[first..].iter().map(|r| DecodeRow { request: r.request, token: r.next }).collect();
        let tokens = self.executor.decode(&rows)?;
        for (index, token) in (first..).zip(tokens) {
            match token {
                Ok(token) => self.deliver(index, token, events),
                Err(error) => {
                    let request = self.running[index].request;
                    self.running[index].ended = true;
                    self.fail(request, error.to_string(), events);
                }
            }
        }
        self.running.retain(|r| !r.ended);
        Ok(())
    }

    /// Reports a token; marks and forgets the request when it was its last.
    fn deliver(&mut self, index: usize, token: TokenId, events: &mut Vec<Event>) {
        let Running { request, generated, .. } = self.running[index];
        let limits = &self.stops.iter().find(|(id, _)| *id == request).expect("a running request was submitted").1;
        let stop = limits.stop_tokens.contains(&token);
        let full = generated + 1 == limits.max_new_tokens;
        events.push(Event::Token { request, token });
        if stop || full {
            let reason = if stop { FinishReason::Stop } else { FinishReason::Length };
            events.push(Event::Finished { request, reason });
            self.running[index].ended = true;
            self.forget(request);
        } else {
            self.running[index].generated = generated + 1;
            self.running[index].next = token;
        }
    }

    fn fail(&mut self, request: RequestId, error: String, events: &mut Vec<Event>) {
        events.push(Event::Failed { request, error });
        self.forget(request);
    }

    fn forget(&mut self, request: RequestId) {
        self.executor.release(request);
        self.stops.retain(|(id, _)| *id != request);
    }

    fn abandon_all(&mut self) {
        for (request, _) in std::mem::take(&mut self.stops) {
            self.executor.release(request);
        }
        self.waiting.clear();
        self.prefilling.clear();
        self.running.clear();
    }
}

#[cfg(test)]
mod tests;
