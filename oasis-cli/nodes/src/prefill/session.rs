//! One decode node's session with the prefill node.

use super::worker::{Job, JobState, Outcome, Reply, Second};
use super::{Counted, Shared, Staged};
use crate::reads::{self, Granted};
use oasis_core::hand_over::HandOver;
use oasis_core::ids::TokenId;
use oasis_transport::remote::{
    BlockRead, Lending, MAX_READ_BYTES, Message, PartResult, Session, SessionError, split_hand_over,
};
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Prompts of one session that may wait or be read at once.
const MAX_JOBS: usize = 256;
/// Requests whose end is remembered, to say why their blocks are gone.
const REMEMBERED: usize = 1024;
/// Longest silence while a prompt is being read.
const SIGN_OF_LIFE: Duration = Duration::from_millis(500);

/// A prompt that is being read; dropping it cancels that.
struct Running(Arc<JobState>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.cancelled.store(true, Ordering::SeqCst);
    }
}

/// Blocks that this session may read.
struct Grant {
    /// Where it reads them from memory itself; ended before the blocks are.
    _lending: Option<Lending>,
    staged: Staged,
    blocks: usize,
    expires: Instant,
}

struct Peer {
    shared: Arc<Shared>,
    session: Session,
    jobs: mpsc::Sender<Job>,
    outcomes: UnboundedSender<(u64, Outcome)>,
    running: HashMap<u64, Running>,
    grants: HashMap<u64, Grant>,
    /// The session reads blocks from memory itself.
    is_one_sided: bool,
    /// Requests that ended before their decode node said so, and why.
    gone: VecDeque<(u64, String)>,
}

/// Serves a decode node until it goes: everything it held is released then.
pub async fn run(shared: Arc<Shared>, session: Session, jobs: mpsc::Sender<Job>, address: SocketAddr) {
    let _counted = Counted::new(&shared.counts, |counts| &counts.sessions);
    tracing::info!("{address}: a decode node has connected");
    let (outcomes, mut arriving) = unbounded_channel();
    let shortest = shared.options.lease.min(shared.options.terms.timeout) / 4;
    let mut tick = interval(shortest.clamp(Duration::from_millis(1), SIGN_OF_LIFE));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (running, grants, gone) = (HashMap::new(), HashMap::new(), VecDeque::new());
    let mut peer = Peer { shared, session, jobs, outcomes, running, grants, is_one_sided: false, gone };
    loop {
        let done = tokio::select! {
            received = peer.session.next() => match received {
                Ok(received) => peer.obey(received.message).await,
                Err(error) => Err(error),
            },
            Some((request, outcome)) = arriving.recv() => peer.admit(request, outcome).await,
            _ = tick.tick() => peer.tick(),
        };
        if let Err(error) = done {
            let (jobs, grants) = (peer.running.len(), peer.grants.len());
            return tracing::info!("{address}: {error}; {jobs} prompts and {grants} requests are given up");
        }
    }
}

impl Peer {
    async fn obey(&mut self, message: Message) -> Result<(), SessionError> {
        match message {
            Message::Prefill { request, max_new_tokens, sampling, prompt } => {
                let prompt: Vec<TokenId> = prompt.into_iter().map(TokenId).collect();
                let problem =
                    if request == 0 || self.running.contains_key(&request) || self.grants.contains_key(&request) {
                        Some("expected a number above 0 that no other request of the session has")
                    } else if prompt.is_empty() || max_new_tokens == 0 {
                        Some("expected a prompt and at least one token to generate, found none")
                    } else if self.running.len() >= MAX_JOBS {
                        Some("too many prompts wait already")
                    } else {
                        None
                    };
                if let Some(problem) = problem {
                    return self.refuse(request, problem.to_owned());
                }
                let state = Arc::<JobState>::default();
                self.running.insert(request, Running(state.clone()));
                let job = Job {
                    prompt,
                    max_new_tokens: max_new_tokens as usize,
                    sampling,
                    state,
                    reply: Reply::new(request, self.outcomes.clone()),
                    counted: Counted::new(&self.shared.counts, |counts| &counts.jobs),
                };
                // A worker that is gone drops the job, whose reply then says so.
                let _ = self.jobs.send(job);
                Ok(())
            }
            Message::OpenPool => match &self.shared.options.staging {
                Some(staging) => {
                    self.is_one_sided = true;
                    self.session.post(&Message::Pool { descriptor: staging.descriptor() }).map(drop)
                }
                None => self.refuse(
                    0,
                    "nodes.transport: expected blocks as messages (tcp), found a decode node that reads memory; both \
                     nodes need the same"
                        .to_owned(),
                ),
            },
            Message::Read { id, parts } => self.read(id, parts).await,
            Message::Renew { requests } => {
                requests.iter().for_each(|request| self.renew(*request));
                Ok(())
            }
            Message::Release { request } => {
                self.running.remove(&request);
                self.grants.remove(&request);
                self.gone.retain(|(gone, _)| *gone != request);
                Ok(())
            }
            other => Err(SessionError::Unexpected { expected: "a message of a decode node", found: other.name() }),
        }
    }

    fn refuse(&self, request: u64, reason: String) -> Result<(), SessionError> {
        self.session.post(&Message::Refused { request, reason }).map(drop)
    }

    fn renew(&mut self, request: u64) {
        if let Some(grant) = self.grants.get_mut(&request) {
            grant.expires = Instant::now() + self.shared.options.lease;
        }
    }

    async fn read(&mut self, id: u64, parts: Vec<BlockRead>) -> Result<(), SessionError> {
        let mut answers: Vec<PartResult> = Vec::with_capacity(parts.len());
        let mut room = MAX_READ_BYTES;
        for part in &parts {
            self.renew(part.request);
            let Some(grant) = self.grants.get(&part.request) else {
                let known = self.gone.iter().find(|(request, _)| *request == part.request);
                let reason = known.map_or("expected a request of this session, found none", |(_, reason)| reason);
                answers.push(Err(reason.to_owned()));
                continue;
            };
            let granted = Granted { request: grant.staged.request, blocks: grant.blocks };
            let answer = reads::read(&*self.shared.store, &self.shared.geometry, granted, part, &mut room).await;
            if answer.is_ok() {
                self.shared.counts.blocks_sent.fetch_add(part.blocks.len() as u64, Ordering::SeqCst);
            }
            answers.push(answer);
        }
        self.session.send(&Message::Blocks { id, parts: answers }).await.map(drop)
    }

    async fn admit(&mut self, request: u64, outcome: Outcome) -> Result<(), SessionError> {
        // Released meanwhile: what is staged goes with the outcome.
        if self.running.remove(&request).is_none() {
            return Ok(());
        }
        let lease = self.shared.options.lease;
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        match outcome {
            Outcome::Failed(reason) => self.refuse(request, reason),
            Outcome::Read { first, second: None } => {
                self.session.post(&Message::Admitted { request, first: first.0, second: None, lease_ms }).map(drop)
            }
            Outcome::Read { first, second: Some(second) } => {
                let Second { token, state, staged } = *second;
                let blocks = self.shared.geometry.full_blocks(state.position());
                let lending = match self.lend(&staged, &state).await {
                    Ok(lending) => lending,
                    Err(problem) => return self.refuse(request, problem),
                };
                let places = lending.as_ref().map(|lending| lending.places().clone());
                let expires = Instant::now() + lease;
                self.grants.insert(request, Grant { _lending: lending, staged, blocks, expires });
                let (state, layers) = split_hand_over(state);
                let second = Some((token.0, state));
                self.session.send(&Message::Admitted { request, first: first.0, second, lease_ms }).await?;
                if let Some(places) = places {
                    self.session.send(&Message::Places { request, places }).await?;
                }
                for layer in layers {
                    self.session.send(&Message::Layer { request, layer }).await?;
                }
                self.renew(request);
                Ok(())
            }
        }
    }

    /// Lends blocks where the session reads them itself.
    async fn lend(&self, staged: &Staged, state: &HandOver) -> Result<Option<Lending>, String> {
        let Some(staging) = self.shared.options.staging.as_ref().filter(|_| self.is_one_sided) else { return Ok(None) };
        let Shared { store, geometry, .. } = &*self.shared;
        // A block that the first step has completed is still in the tail, which the state brings.
        let blocks = state.layers.iter().map(|layer| layer.blocks(geometry, state.position()).unwrap_or(0));
        let blocks: Vec<usize> = blocks.collect();
        let lending = staging.lend(&**store, staged.request, geometry, &blocks).await;
        lending.map(Some).map_err(|error| error.to_string())
    }

    /// Says that prompts are still being read, and ends leases.
    fn tick(&mut self) -> Result<(), SessionError> {
        let now = Instant::now();
        let expired: Vec<u64> =
            self.grants.iter().filter(|(_, grant)| grant.expires <= now).map(|(request, _)| *request).collect();
        for request in expired {
            self.grants.remove(&request);
            let lease = self.shared.options.lease.as_millis();
            let reason = format!("its lease of {lease} ms has ended: the decode node gave no sign of life");
            tracing::warn!("request {request}: {reason}");
            self.gone.push_back((request, reason));
            if self.gone.len() > REMEMBERED {
                self.gone.pop_front();
            }
        }
        for (&request, Running(state)) in &self.running {
            let (done, total) = (state.done.load(Ordering::Relaxed), state.total.load(Ordering::Relaxed));
            self.session.post(&Message::Progress { request, done, total })?;
        }
        Ok(())
    }
}
