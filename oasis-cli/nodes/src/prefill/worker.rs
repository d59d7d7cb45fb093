//! The thread that reads prompts, one after the other.

use super::{Counted, Shared, Staged};
use oasis_core::executor::{Admission, DecodeRow, Executor, PrefillProgress, Sequence};
use oasis_core::hand_over::HandOver;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::CpuExecutor;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// How often a prompt that waits for room asks for it.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// A prompt to be read.
pub struct Job {
    pub prompt: Vec<TokenId>,
    pub max_new_tokens: usize,
    pub sampling: SamplingParams,
    pub state: Arc<JobState>,
    pub reply: Reply,
    pub counted: Counted,
}

/// What the session and the worker tell each other meanwhile.
#[derive(Default)]
pub struct JobState {
    pub cancelled: AtomicBool,
    pub done: AtomicU64,
    pub total: AtomicU64,
}

/// How a job ended.
pub enum Outcome {
    Read { first: TokenId, second: Option<Box<Second>> },
    Failed(String),
}

/// A request that can be taken over.
pub struct Second {
    pub token: TokenId,
    pub state: HandOver,
    pub staged: Staged,
}

/// Where a job's outcome goes: there is one whatever happens to the worker.
pub struct Reply {
    number: u64,
    session: Option<UnboundedSender<(u64, Outcome)>>,
}

impl Reply {
    pub fn new(number: u64, session: UnboundedSender<(u64, Outcome)>) -> Self {
        Self { number, session: Some(session) }
    }

    fn send(mut self, outcome: Outcome) {
        if let Some(session) = self.session.take() {
            // A session that is gone drops the outcome, and with it what is staged.
            let _ = session.send((self.number, outcome));
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            let _ = session.send((self.number, Outcome::Failed("the prefill node stopped".to_owned())));
        }
    }
}

pub struct Worker {
    executor: CpuExecutor,
    shared: Arc<Shared>,
}

impl Worker {
    pub fn new(executor: CpuExecutor, shared: Arc<Shared>) -> Self {
        Self { executor, shared }
    }

    /// Works until the last session is gone.
    pub fn run(mut self, queue: &mpsc::Receiver<Job>) {
        for job in queue {
            let request = RequestId(self.shared.next_request.fetch_add(1, Ordering::Relaxed));
            let outcome = self.read(request, &job);
            let Job { reply, counted, .. } = job;
            drop(counted);
            match outcome {
                Ok(Outcome::Read { first, second: Some(second) }) => {
                    reply.send(Outcome::Read { first, second: Some(second) });
                }
                Ok(outcome) => {
                    self.executor.release(request);
                    reply.send(outcome);
                }
                Err(problem) => {
                    self.executor.release(request);
                    reply.send(Outcome::Failed(problem));
                }
            }
        }
    }

    /// Reads a prompt and runs the first step. A request that is handed over is not the executor's any more.
    fn read(&mut self, request: RequestId, job: &Job) -> Result<Outcome, String> {
        let is_cancelled = || match job.state.cancelled.load(Ordering::SeqCst) {
            true => Err("cancelled".to_owned()),
            false => Ok(()),
        };
        let info = self.executor.info();
        if let Some(token) = job.prompt.iter().find(|token| token.index() >= info.vocab) {
            return Err(format!("token {token} is not in the vocabulary of {}", info.vocab));
        }
        let tokens = job.prompt.len().saturating_add(job.max_new_tokens.saturating_sub(1));
        if tokens > info.max_context {
            return Err(format!("expected a context of at most {} tokens, found {tokens}", info.max_context));
        }
        // The rest is generated elsewhere.
        let max_new_tokens = job.max_new_tokens.min(2);
        let sequence = Sequence { request, prompt: job.prompt.clone(), max_new_tokens, sampling: job.sampling };
        let asked = Instant::now();
        loop {
            is_cancelled()?;
            match self.executor.admit(sequence.clone()).map_err(|error| format!("{error:#}"))? {
                Admission::Admitted => break,
                Admission::Refused { reason } => return Err(reason),
                Admission::Wait { reason } if asked.elapsed() >= self.shared.options.wait => {
                    return Err(format!("the prefill node is full: {reason}"));
                }
                Admission::Wait { .. } => std::thread::sleep(ASK_EVERY),
            }
        }
        let first = loop {
            is_cancelled()?;
            match self.executor.prefill(request).map_err(|error| error.to_string())? {
                PrefillProgress::Done(token) => break token,
                PrefillProgress::Running { done, total } => {
                    job.state.done.store(done as u64, Ordering::Relaxed);
                    job.state.total.store(total as u64, Ordering::Relaxed);
                }
            }
        };
        if max_new_tokens < 2 {
            return Ok(Outcome::Read { first, second: None });
        }
        let row = DecodeRow { request, token: first };
        let mut tokens = self.executor.decode(&[row]).map_err(|error| format!("{error:#}"))?;
        let token = tokens.pop().expect("one row has one result").map_err(|error| error.to_string())?;
        let state = self.executor.hand_over(request).map_err(|error| error.to_string())?;
        let counted = Counted::new(&self.shared.counts, |counts| &counts.granted);
        let staged = Staged { request, store: self.shared.store.clone(), _counted: counted };
        Ok(Outcome::Read { first, second: Some(Box::new(Second { token, state, staged })) })
    }
}
