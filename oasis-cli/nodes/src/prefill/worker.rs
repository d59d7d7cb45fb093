//! The thread that reads prompts, several in turn.

use super::{Counted, Shared, Staged};
use oasis_core::executor::{Admission, DecodeRow, PrefillProgress, Sequence};
use oasis_core::hand_over::{HandOver, HandsOver};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::sampling::SamplingParams;
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

/// A job that the worker has taken.
struct Active {
    request: RequestId,
    job: Job,
    since: Instant,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Waits for room in memory or in the staging pool.
    Waits,
    /// Its prompt is being read.
    Reads,
    /// Its prompt has been read; this is the first token, which the first step runs.
    Steps(TokenId),
}

impl Active {
    /// The rest is generated elsewhere.
    fn max_new_tokens(&self) -> usize {
        self.job.max_new_tokens.min(2)
    }

    fn finish(self, outcome: Outcome) {
        let Job { reply, counted, .. } = self.job;
        drop(counted);
        reply.send(outcome);
    }
}

pub struct Worker<E> {
    executor: E,
    shared: Arc<Shared>,
    /// In the order in which they came.
    active: Vec<Active>,
}

impl<E: HandsOver> Worker<E> {
    pub fn new(executor: E, shared: Arc<Shared>) -> Self {
        Self { executor, shared, active: Vec::new() }
    }

    /// Works until the last session is gone. Prompts are read in turn, as many as the executor takes; those that are
    /// complete run their first step together.
    pub fn run(mut self, queue: &mpsc::Receiver<Job>) {
        loop {
            if self.active.is_empty() {
                match queue.recv() {
                    Ok(job) => self.take(job),
                    Err(_) => return,
                }
            }
            queue.try_iter().for_each(|job| self.take(job));
            self.give_up_cancelled();
            self.admit();
            self.read();
            self.step();
            if !self.active.is_empty() && self.active.iter().all(|active| active.state == State::Waits) {
                std::thread::sleep(ASK_EVERY);
            }
        }
    }

    fn take(&mut self, job: Job) {
        let info = self.executor.info();
        let tokens = job.prompt.len().saturating_add(job.max_new_tokens.saturating_sub(1));
        let problem = if let Some(token) = job.prompt.iter().find(|token| token.index() >= info.vocab) {
            Some(format!("token {token} is not in the vocabulary of {}", info.vocab))
        } else if tokens > info.max_context {
            Some(format!("expected a context of at most {} tokens, found {tokens}", info.max_context))
        } else {
            None
        };
        let request = RequestId(self.shared.next_request.fetch_add(1, Ordering::Relaxed));
        let active = Active { request, job, since: Instant::now(), state: State::Waits };
        match problem {
            Some(problem) => active.finish(Outcome::Failed(problem)),
            None => self.active.push(active),
        }
    }

    fn fail(&mut self, active: Active, problem: String) {
        self.executor.release(active.request);
        active.finish(Outcome::Failed(problem));
    }

    fn give_up_cancelled(&mut self) {
        for active in std::mem::take(&mut self.active) {
            match active.job.state.cancelled.load(Ordering::SeqCst) {
                true => self.fail(active, "cancelled".to_owned()),
                false => self.active.push(active),
            }
        }
    }

    /// Makes room for prompts in their order: none overtakes one that waits.
    fn admit(&mut self) {
        let mut is_full: Option<String> = None;
        let reading = self.active.iter().filter(|active| active.state != State::Waits).count();
        let mut places = self.executor.prompts_in_turn().saturating_sub(reading);
        for mut active in std::mem::take(&mut self.active) {
            if active.state == State::Waits && is_full.is_none() && places > 0 {
                let (prompt, max_new_tokens) = (active.job.prompt.clone(), active.max_new_tokens());
                let sampling = active.job.sampling;
                match self.executor.admit(Sequence { request: active.request, prompt, max_new_tokens, sampling }) {
                    Ok(Admission::Admitted) => {
                        active.state = State::Reads;
                        places -= 1;
                    }
                    Ok(Admission::Wait { reason }) => is_full = Some(reason),
                    Ok(Admission::Refused { reason }) => {
                        self.fail(active, reason);
                        continue;
                    }
                    Err(error) => {
                        self.fail(active, format!("{error:#}"));
                        continue;
                    }
                }
            }
            match &is_full {
                Some(reason) if active.state == State::Waits && active.since.elapsed() >= self.shared.options.wait => {
                    let problem = format!("the prefill node is full: {reason}");
                    self.fail(active, problem);
                }
                _ => self.active.push(active),
            }
        }
    }

    /// Reads one chunk of each prompt.
    fn read(&mut self) {
        for mut active in std::mem::take(&mut self.active) {
            if active.state != State::Reads {
                self.active.push(active);
                continue;
            }
            match self.executor.prefill(active.request) {
                Ok(PrefillProgress::Done(first)) if active.max_new_tokens() < 2 => {
                    self.executor.release(active.request);
                    active.finish(Outcome::Read { first, second: None });
                }
                Ok(PrefillProgress::Done(first)) => {
                    active.state = State::Steps(first);
                    self.active.push(active);
                }
                Ok(PrefillProgress::Running { done, total }) => {
                    active.job.state.done.store(done as u64, Ordering::Relaxed);
                    active.job.state.total.store(total as u64, Ordering::Relaxed);
                    self.active.push(active);
                }
                Err(error) => self.fail(active, error.to_string()),
            }
        }
    }

    /// Runs the first decode step of all prompts that are complete. A request that is handed over is not the executor's
    /// any more.
    fn step(&mut self) {
        let row = |active: &Active| match active.state {
            State::Steps(token) => Some(DecodeRow { request: active.request, token }),
            _ => None,
        };
        let rows: Vec<DecodeRow> = self.active.iter().filter_map(row).collect();
        if rows.is_empty() {
            return;
        }
        let results = match self.executor.decode(&rows) {
            Ok(results) => results.into_iter().map(|result| result.map_err(|error| error.to_string())).collect(),
            Err(error) => vec![Err(format!("{error:#}")); rows.len()],
        };
        let mut results = results.into_iter();
        for active in std::mem::take(&mut self.active) {
            let State::Steps(first) = active.state else {
                self.active.push(active);
                continue;
            };
            let token = results.next().expect("one row has one result");
            let handed = token.and_then(|token| {
                let state = self.executor.hand_over(active.request).map_err(|error| error.to_string())?;
                Ok((token, state))
            });
            match handed {
                Ok((token, state)) => {
                    let counted = Counted::new(&self.shared.counts, |counts| &counts.granted);
                    let staged =
                        Staged { request: active.request, store: self.shared.store.clone(), _counted: counted };
                    let second = Some(Box::new(Second { token, state, staged }));
                    active.finish(Outcome::Read { first, second });
                }
                Err(problem) => self.fail(active, problem),
            }
        }
    }
}
