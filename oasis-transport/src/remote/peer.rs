//! The decode node's end: one session with a prefill node, shared by all requests.

use super::error::SessionError;
use super::message::{BlockRead, Message, PartResult, Service};
use super::one_sided::Places;
use super::reader::{BlockReader, Lent, ReadResult};
use super::session::{Session, Terms, connect};
use async_trait::async_trait;
use oasis_core::hand_over::{HandOver, LayerHandOver};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::memory::HostEntry;
use oasis_core::sampling::SamplingParams;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

/// A prefill node, and how to speak to it.
#[derive(Debug, Clone)]
pub struct PeerOptions {
    /// `host:port`.
    pub address: String,
    /// Secret, facts and the deadline of every operation.
    pub terms: Terms,
    /// Layers of the model: as many parts of a state are expected.
    pub layers: usize,
}

/// A request that can be taken over.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrived {
    /// First generated token.
    pub first: TokenId,
    /// Second token and the state after it; `None` where one token was asked for.
    pub second: Option<(TokenId, HandOver)>,
    /// Where its blocks lie; always there with a second token where the peer was asked for places.
    pub lent: Option<Lent>,
    /// Bytes of the messages that brought it.
    pub bytes: u64,
}

/// What a prefill node says of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum PeerEvent {
    /// Token-layers done, and of all.
    Progress {
        /// Done.
        done: u64,
        /// Of all.
        total: u64,
    },
    /// The request can be taken over.
    Arrived(Box<Arrived>),
    /// It cannot go on.
    Failed(String),
}

/// A prefill node as a decode node sees it. The session is opened with the first request, and again with the first one
/// after it was lost; requests of a lost session fail when they need a block that has not crossed.
pub struct PrefillPeer {
    commands: mpsc::UnboundedSender<Command>,
}

struct Job {
    request: u64,
    prompt: Vec<TokenId>,
    max_new_tokens: usize,
    sampling: SamplingParams,
    events: mpsc::UnboundedSender<PeerEvent>,
}

enum Command {
    Prefill(Job),
    Read { parts: Vec<BlockRead>, reply: oneshot::Sender<Vec<PartResult>> },
    Release(u64),
}

impl PrefillPeer {
    /// A peer whose session is served on `runtime`, which needs time and I/O. It ends with the last handle. With
    /// `wants_places` blocks are read from the node's memory, and it has to say where they lie.
    pub fn start(runtime: &tokio::runtime::Handle, options: PeerOptions, wants_places: bool) -> Arc<Self> {
        let (commands, receiver) = mpsc::unbounded_channel();
        runtime.spawn(Actor::new(options, wants_places).run(receiver));
        Arc::new(Self { commands })
    }

    /// Asks for a prompt to be read; the last event is [`PeerEvent::Arrived`] or [`PeerEvent::Failed`].
    pub fn prefill(
        &self,
        request: RequestId,
        prompt: Vec<TokenId>,
        max_new_tokens: usize,
        sampling: SamplingParams,
    ) -> mpsc::UnboundedReceiver<PeerEvent> {
        let (events, receiver) = mpsc::unbounded_channel();
        // Where nobody listens any more, the events end at once.
        let _ =
            self.commands.send(Command::Prefill(Job { request: request.0, prompt, max_new_tokens, sampling, events }));
        receiver
    }
}

#[async_trait]
impl BlockReader for PrefillPeer {
    async fn read(&self, parts: Vec<BlockRead>) -> Vec<ReadResult> {
        let count = parts.len();
        let (reply, answer) = oneshot::channel();
        let _ = self.commands.send(Command::Read { parts, reply });
        let answers = answer.await.unwrap_or_else(|_| vec![Err("the node is shutting down".to_owned()); count]);
        answers.into_iter().map(|answer| answer.map(HostEntry::from)).collect()
    }

    fn release(&self, request: RequestId) {
        let _ = self.commands.send(Command::Release(request.0));
    }
}

/// A request whose prompt is being read.
struct Reading {
    events: mpsc::UnboundedSender<PeerEvent>,
    /// The node must say something before this.
    deadline: Instant,
    /// What has come of the state.
    arrived: Option<Box<Arrived>>,
}

struct PendingRead {
    /// Answers so far, and which of them are still to come.
    answers: Vec<PartResult>,
    asked: Vec<usize>,
    reply: oneshot::Sender<Vec<PartResult>>,
    deadline: Instant,
}

/// What happens next.
enum Next {
    Command(Option<Command>),
    Message(Result<super::session::Received, SessionError>),
    Deadline,
}

struct Actor {
    options: PeerOptions,
    wants_places: bool,
    session: Option<Session>,
    /// Staging pool of the session's node.
    pool: Option<Arc<[u8]>>,
    reading: BTreeMap<u64, Reading>,
    /// Requests whose blocks may be read, or why they may no more.
    granted: HashMap<u64, Result<(), String>>,
    reads: BTreeMap<u64, PendingRead>,
    next_read: u64,
    renew_every: Duration,
    renew_at: Instant,
}

impl Actor {
    fn new(options: PeerOptions, wants_places: bool) -> Self {
        let renew_every = Duration::from_secs(3600);
        Self {
            options,
            wants_places,
            session: None,
            pool: None,
            reading: BTreeMap::new(),
            granted: HashMap::new(),
            reads: BTreeMap::new(),
            next_read: 0,
            renew_every,
            renew_at: Instant::now() + renew_every,
        }
    }

    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        loop {
            let deadline = self.next_deadline();
            let message = async {
                match &mut self.session {
                    Some(session) => session.next().await,
                    None => std::future::pending().await,
                }
            };
            let next = tokio::select! {
                command = commands.recv() => Next::Command(command),
                message = message => Next::Message(message),
                () = sleep_until(deadline) => Next::Deadline,
            };
            let done = match next {
                Next::Command(None) => return,
                Next::Command(Some(command)) => self.obey(command).await,
                Next::Message(received) => match received {
                    Ok(received) => self.take(received.message, received.bytes),
                    Err(error) => Err(error),
                },
                Next::Deadline => self.check_deadlines(),
            };
            if let Err(error) = done {
                self.lose(&error);
            }
        }
    }

    fn next_deadline(&self) -> Instant {
        let reading = self.reading.values().map(|reading| reading.deadline);
        reading.chain(self.reads.values().map(|read| read.deadline)).fold(self.renew_at, Instant::min)
    }

    fn patience(&self) -> Instant {
        Instant::now() + self.options.terms.timeout
    }

    /// Never waits for the peer: two ends that wait for each other's reading would stand still.
    fn post(&self, message: &Message) -> Result<(), SessionError> {
        match &self.session {
            Some(session) => session.post(message).map(drop),
            None => Err(SessionError::Closed),
        }
    }

    async fn obey(&mut self, command: Command) -> Result<(), SessionError> {
        match command {
            Command::Prefill(job) => self.prefill(job).await,
            Command::Read { parts, reply } => self.read(parts, reply),
            Command::Release(request) => {
                let known =
                    self.reading.remove(&request).is_some() | matches!(self.granted.remove(&request), Some(Ok(())));
                match known && self.session.is_some() {
                    true => self.post(&Message::Release { request }),
                    false => Ok(()),
                }
            }
        }
    }

    async fn prefill(&mut self, job: Job) -> Result<(), SessionError> {
        let Job { request, prompt, max_new_tokens, sampling, events } = job;
        if self.session.is_none() {
            match connect(&self.options.address, Service::Prefill, &self.options.terms).await {
                Ok(session) => {
                    self.session = Some(session);
                    if self.wants_places {
                        self.post(&Message::OpenPool)?;
                    }
                }
                Err(error) => {
                    // The request is over before it began; there is no session to lose.
                    let _ = events.send(PeerEvent::Failed(self.complaint(&error)));
                    return Ok(());
                }
            }
        }
        let deadline = self.patience();
        self.reading.insert(request, Reading { events, deadline, arrived: None });
        let max_new_tokens = u32::try_from(max_new_tokens).unwrap_or(u32::MAX);
        let prompt = prompt.into_iter().map(|token| token.0).collect();
        self.post(&Message::Prefill { request, max_new_tokens, sampling, prompt })
    }

    fn read(&mut self, parts: Vec<BlockRead>, reply: oneshot::Sender<Vec<PartResult>>) -> Result<(), SessionError> {
        let answer = |part: &BlockRead| match self.granted.get(&part.request) {
            Some(Ok(())) => Err("the prefill node left a part out".to_owned()),
            Some(Err(reason)) => Err(reason.clone()),
            None => Err("the prefill node has granted no blocks of this request".to_owned()),
        };
        let answers: Vec<PartResult> = parts.iter().map(answer).collect();
        let is_granted = |part: &BlockRead| matches!(self.granted.get(&part.request), Some(Ok(())));
        let (asked, parts): (Vec<usize>, Vec<BlockRead>) =
            parts.into_iter().enumerate().filter(|(_, part)| is_granted(part)).unzip();
        if parts.is_empty() {
            // Whoever asked may have gone.
            let _ = reply.send(answers);
            return Ok(());
        }
        let id = self.next_read;
        self.next_read += 1;
        let deadline = self.patience();
        self.reads.insert(id, PendingRead { answers, asked, reply, deadline });
        self.post(&Message::Read { id, parts })
    }

    /// Takes a message of the prefill node.
    fn take(&mut self, message: Message, bytes: u64) -> Result<(), SessionError> {
        let patience = self.patience();
        match message {
            Message::Progress { request, done, total } => {
                if let Some(reading) = self.reading.get_mut(&request) {
                    reading.deadline = patience;
                    let _ = reading.events.send(PeerEvent::Progress { done, total });
                }
            }
            Message::Admitted { request, first, second, lease_ms } => {
                self.renew_every = Duration::from_millis((lease_ms / 3).max(1));
                self.renew_at = self.renew_at.min(Instant::now() + self.renew_every);
                if let Some(reading) = self.reading.get_mut(&request) {
                    let second = second.map(|(token, state)| (TokenId(token), state));
                    reading.deadline = patience;
                    let lent = None;
                    reading.arrived = Some(Box::new(Arrived { first: TokenId(first), second, lent, bytes }));
                }
                self.finish(request);
            }
            Message::Pool { descriptor } => self.pool = Some(descriptor.into()),
            Message::Places { request, places } => self.take_places(request, places, bytes)?,
            Message::Layer { request, layer } => {
                self.take_layer(request, layer, bytes)?;
                self.finish(request);
            }
            Message::Refused { request: 0, reason } => return Err(SessionError::Refused(reason)),
            Message::Refused { request, reason } => {
                if let Some(reading) = self.reading.remove(&request) {
                    let _ = reading.events.send(PeerEvent::Failed(reason));
                } else if let Some(granted) = self.granted.get_mut(&request) {
                    *granted = Err(reason);
                }
            }
            Message::Blocks { id, parts } => {
                let Some(mut read) = self.reads.remove(&id) else { return Ok(()) };
                for (index, part) in read.asked.into_iter().zip(parts) {
                    read.answers[index] = part;
                }
                let _ = read.reply.send(read.answers);
            }
            other => {
                return Err(SessionError::Unexpected { expected: "an answer of a prefill node", found: other.name() });
            }
        }
        Ok(())
    }

    fn take_layer(&mut self, request: u64, layer: LayerHandOver, bytes: u64) -> Result<(), SessionError> {
        // Of a request that was released meanwhile.
        let Some(reading) = self.reading.get_mut(&request) else { return Ok(()) };
        let deadline = Instant::now() + self.options.terms.timeout;
        match reading.arrived.as_deref_mut() {
            Some(Arrived { second: Some((_, state)), bytes: all, .. }) if state.layers.len() < self.options.layers => {
                state.layers.push(layer);
                *all += bytes;
                reading.deadline = deadline;
                Ok(())
            }
            _ => Err(SessionError::Unexpected { expected: "a layer that is missing", found: "layer" }),
        }
    }

    fn take_places(&mut self, request: u64, places: Places, bytes: u64) -> Result<(), SessionError> {
        // Of a request that was released meanwhile.
        let Some(reading) = self.reading.get_mut(&request) else { return Ok(()) };
        match (reading.arrived.as_deref_mut(), &self.pool) {
            (Some(Arrived { second: Some(_), lent: lent @ None, bytes: all, .. }), Some(pool)) => {
                *lent = Some(Lent { pool: pool.clone(), places });
                *all += bytes;
                self.finish(request);
                Ok(())
            }
            _ => Err(SessionError::Unexpected { expected: "places of a request that has none", found: "places" }),
        }
    }

    /// Reports a request of which everything is there.
    fn finish(&mut self, request: u64) {
        let is_complete = |arrived: &Arrived| {
            let is_lent = arrived.lent.is_some() || !self.wants_places;
            arrived.second.as_ref().is_none_or(|(_, state)| state.layers.len() == self.options.layers && is_lent)
        };
        if !self.reading.get(&request).and_then(|r| r.arrived.as_deref()).is_some_and(is_complete) {
            return;
        }
        let Some(Reading { events, arrived: Some(arrived), .. }) = self.reading.remove(&request) else { return };
        if arrived.second.is_some() {
            self.granted.insert(request, Ok(()));
        }
        let _ = events.send(PeerEvent::Arrived(arrived));
    }

    fn check_deadlines(&mut self) -> Result<(), SessionError> {
        let now = Instant::now();
        let after = self.options.terms.timeout;
        if self.reads.values().any(|read| read.deadline <= now) {
            return Err(SessionError::TimedOut { what: "reading blocks", after });
        }
        if self.reading.values().any(|reading| reading.deadline <= now) {
            return Err(SessionError::TimedOut { what: "reading a prompt", after });
        }
        if self.renew_at <= now {
            self.renew_at = now + self.renew_every;
            let held = self.granted.iter().filter(|(_, granted)| granted.is_ok());
            let requests: Vec<u64> = held.map(|(request, _)| *request).collect();
            if !requests.is_empty() {
                return self.post(&Message::Renew { requests });
            }
        }
        Ok(())
    }

    fn complaint(&self, error: &SessionError) -> String {
        format!("prefill node {}: {error}", self.options.address)
    }

    /// Ends the session: nothing of it can arrive any more. Every request that waits for something is told.
    fn lose(&mut self, error: &SessionError) {
        if self.session.take().is_none() {
            return;
        }
        self.pool = None;
        let reason = self.complaint(error);
        tracing::warn!("{reason}");
        for reading in std::mem::take(&mut self.reading).into_values() {
            let _ = reading.events.send(PeerEvent::Failed(reason.clone()));
        }
        for read in std::mem::take(&mut self.reads).into_values() {
            let mut answers = read.answers;
            read.asked.into_iter().for_each(|index| answers[index] = Err(reason.clone()));
            let _ = read.reply.send(answers);
        }
        for granted in self.granted.values_mut().filter(|granted| granted.is_ok()) {
            *granted = Err(reason.clone());
        }
    }
}
