//! The streaming generation loop: engine events in, text and measurements out.

use crate::error::{CliError, CliResult};
use crate::progress::Progress;
use crate::report::RequestFacts;
use crate::tokens::Decode;
use oasis_core::engine::{Engine, Event, FinishReason, GenerateRequest};
use oasis_core::executor::{Executor, PrefillProgress};
use oasis_core::geometry::KvFootprint;
use oasis_core::ids::{RequestId, TokenId};
use serde::Serialize;
use std::io;
use std::time::Instant;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// The model ended its text.
    Stop,
    /// All tokens that were asked for are there.
    Length,
    /// Ctrl-C.
    Interrupted,
}

/// What was generated.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// Text, without the token that ended it.
    pub text: String,
    /// Tokens, with the token that ended the text.
    pub tokens: Vec<TokenId>,
    /// Why it ended.
    pub finish: Finish,
    /// Measurements.
    pub facts: RequestFacts,
}

/// Reads the prompt of an admitted request to its end; gives the first token.
///
/// # Errors
/// When the request fails.
pub fn read_prompt(executor: &mut (impl Executor + ?Sized), request: RequestId) -> CliResult<TokenId> {
    loop {
        let progress = executor.prefill(request).map_err(|error| CliError::Failure(error.to_string()))?;
        if let PrefillProgress::Done(token) = progress {
            return Ok(token);
        }
    }
}

/// Runs one request on an idle engine; `sink` receives each piece of text as soon as it is certain.
///
/// `interrupted` is asked between steps; when it says yes the request is cancelled and what is there is returned.
///
/// # Errors
/// When the engine does not take the request, the request or the device fails, or `sink` does.
pub fn generate<E: Executor>(
    engine: &mut Engine<E>,
    decoder: &mut dyn Decode,
    request: GenerateRequest,
    interrupted: &dyn Fn() -> bool,
    sink: &mut dyn FnMut(&str) -> io::Result<()>,
) -> CliResult<Generation> {
    let prompt_tokens = request.prompt.len();
    let mut answer = Answer {
        stop_tokens: request.stop_tokens.clone(),
        clock: Clock::start(),
        text: String::new(),
        tokens: Vec::new(),
        device: KvFootprint::default(),
    };
    let id = engine.submit(request).map_err(|error| CliError::Input(error.to_string()))?;
    let result = answer.run(engine, decoder, interrupted, sink);
    // Interrupted, or the sink failed; a request that has ended is no longer there to be cancelled.
    engine.cancel(id);
    let finish = result?;
    emit(&decoder.finish()?, &mut answer.text, sink)?;
    let Answer { clock, text, tokens, mut device, .. } = answer;
    if device == KvFootprint::default() {
        device = engine.executor().stats().device_peak;
    }
    let facts = clock.facts(prompt_tokens, tokens.len(), device);
    Ok(Generation { text, tokens, finish, facts })
}

/// An answer in the making.
struct Answer {
    stop_tokens: Vec<TokenId>,
    clock: Clock,
    text: String,
    tokens: Vec<TokenId>,
    /// Device memory after the last step in which the request went on.
    device: KvFootprint,
}

impl Answer {
    fn run<E: Executor>(
        &mut self,
        engine: &mut Engine<E>,
        decoder: &mut dyn Decode,
        interrupted: &dyn Fn() -> bool,
        sink: &mut dyn FnMut(&str) -> io::Result<()>,
    ) -> CliResult<Finish> {
        let bar = Progress::parts("reading the prompt");
        while !interrupted() {
            for event in engine.step()? {
                match event {
                    Event::Prefill { done, total, .. } => bar.set(done as u64, total as u64),
                    Event::Token { token, .. } => {
                        bar.clear();
                        self.token(token, decoder, sink)?;
                    }
                    Event::Finished { reason, .. } => return Ok(reason.into()),
                    Event::Refused { reason, .. } => return Err(CliError::Input(reason)),
                    Event::Failed { error, .. } => return Err(CliError::Failure(error)),
                }
            }
            // A request that has ended holds nothing any more.
            if !self.tokens.is_empty() {
                self.device = engine.executor().stats().device;
            }
        }
        Ok(Finish::Interrupted)
    }

    fn token(
        &mut self,
        token: TokenId,
        decoder: &mut dyn Decode,
        sink: &mut dyn FnMut(&str) -> io::Result<()>,
    ) -> CliResult {
        self.clock.token();
        self.tokens.push(token);
        if !self.stop_tokens.contains(&token) {
            emit(&decoder.push(token)?, &mut self.text, sink)?;
        }
        Ok(())
    }
}

fn emit(piece: &str, text: &mut String, sink: &mut dyn FnMut(&str) -> io::Result<()>) -> io::Result<()> {
    text.push_str(piece);
    if piece.is_empty() { Ok(()) } else { sink(piece) }
}

impl From<FinishReason> for Finish {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
        }
    }
}

/// Start, first and last token.
struct Clock {
    start: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Clock {
    fn start() -> Self {
        Self { start: Instant::now(), first: None, last: None }
    }

    fn token(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
    }

    fn facts(&self, prompt_tokens: usize, generated_tokens: usize, device: KvFootprint) -> RequestFacts {
        let first = self.first.unwrap_or_else(Instant::now);
        RequestFacts {
            prompt_tokens,
            generated_tokens,
            prefill: first - self.start,
            decode: self.last.map_or_else(Default::default, |last| last - first),
            device,
        }
    }
}

#[cfg(test)]
mod tests;
