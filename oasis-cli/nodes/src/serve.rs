//! The decode node: answers clients, one request a session.

use crate::decode::DecodeExecutor;
use crate::io::{IoThread, accept_each, listen};
use oasis_core::engine::{Engine, Event, FinishReason, GenerateRequest};
use oasis_core::executor::Executor;
use oasis_core::hand_over::HandsOver;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::memory::StoreUsage;
use oasis_transport::remote::{Message, NodeMetrics, Service, Session, SessionError, Terms, accept};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::interval;

/// Clients that may be served at once; further ones wait.
const MAX_CLIENTS: usize = 256;
/// Longest silence while a client waits for a token.
const SIGN_OF_LIFE: Duration = Duration::from_millis(500);

/// What a decode node holds now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DecodeStatus {
    /// Requests that wait or run.
    pub requests: usize,
    /// Its store.
    pub store: StoreUsage,
    /// Bytes of device memory.
    pub device_bytes: u64,
    /// Most bytes of KV that were ever in its store.
    pub store_peak: u64,
}

/// A decode node that serves until it is dropped.
pub struct DecodeNode {
    address: SocketAddr,
    status: Arc<Mutex<DecodeStatus>>,
    // Clients go before the engine, which then comes to rest.
    _io: IoThread,
    _engine: EngineThread,
}

/// Waits for the engine when the node is dropped.
struct EngineThread(Option<JoinHandle<()>>);

impl Drop for EngineThread {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

/// A client's request on its way to the engine.
struct Submission {
    request: GenerateRequest,
    answers: UnboundedSender<Answer>,
    cancelled: Arc<AtomicBool>,
}

enum Answer {
    Progress { done: u64, total: u64 },
    Token(TokenId),
    Finished { reason: FinishReason, metrics: NodeMetrics },
    Failed(String),
}

impl DecodeNode {
    /// Serves clients at `address` with an engine of at most `max_batch` requests together. Clients must bring the facts
    /// of `terms`.
    ///
    /// # Errors
    /// When the address cannot be listened on or needs a secret, or the machine gives no threads.
    pub fn start<E: HandsOver + 'static>(
        executor: DecodeExecutor<E>,
        max_batch: usize,
        address: &str,
        terms: Terms,
    ) -> anyhow::Result<Self> {
        let listener = listen(address, &terms)?;
        let address = listener.local_addr()?;
        let status = Arc::<Mutex<DecodeStatus>>::default();
        let (submissions, queue) = channel();
        let thread = {
            let status = status.clone();
            let serve = move || Serving::new(Engine::new(executor, max_batch), status).run(&queue);
            std::thread::Builder::new().name("oasis-decode".to_owned()).spawn(serve)?
        };
        let io = IoThread::start("oasis-clients-io")?;
        io.handle().spawn(accept_clients(listener, terms, submissions));
        Ok(Self { address, status, _io: io, _engine: EngineThread(Some(thread)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it holds now.
    pub fn status(&self) -> DecodeStatus {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine's thread.
struct Serving<E> {
    engine: Engine<DecodeExecutor<E>>,
    live: BTreeMap<RequestId, Submission>,
    status: Arc<Mutex<DecodeStatus>>,
}

impl<E: HandsOver> Serving<E> {
    fn new(engine: Engine<DecodeExecutor<E>>, status: Arc<Mutex<DecodeStatus>>) -> Self {
        Self { engine, live: BTreeMap::new(), status }
    }

    fn run(mut self, queue: &Receiver<Submission>) {
        loop {
            self.report();
            if self.engine.is_idle() {
                match queue.recv() {
                    Ok(submission) => self.submit(submission),
                    Err(_) => return,
                }
            }
            while let Ok(submission) = queue.try_recv() {
                self.submit(submission);
            }
            let cancelled: Vec<RequestId> = (self.live.iter())
                .filter(|(_, submission)| submission.cancelled.load(Ordering::SeqCst))
                .map(|(request, _)| *request)
                .collect();
            for request in cancelled {
                self.engine.cancel(request);
                self.live.remove(&request);
            }
            match self.engine.step() {
                Ok(events) => events.into_iter().for_each(|event| self.deliver(event)),
                Err(error) => {
                    tracing::error!("all requests have failed: {error:#}");
                    for submission in std::mem::take(&mut self.live).into_values() {
                        let _ = submission.answers.send(Answer::Failed(format!("{error:#}")));
                    }
                }
            }
        }
    }

    fn report(&self) {
        let executor = self.engine.executor();
        let stats = executor.stats();
        let status = DecodeStatus {
            requests: self.live.len(),
            store: stats.store,
            device_bytes: stats.device.total(),
            store_peak: executor.store().peak_bytes(),
        };
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    fn submit(&mut self, submission: Submission) {
        match self.engine.submit(submission.request.clone()) {
            Ok(request) => drop(self.live.insert(request, submission)),
            Err(error) => drop(submission.answers.send(Answer::Failed(error.to_string()))),
        }
    }

    fn deliver(&mut self, event: Event) {
        let (request, answer) = match event {
            Event::Prefill { request, done, total } => {
                (request, Answer::Progress { done: done as u64, total: total as u64 })
            }
            Event::Token { request, token } => (request, Answer::Token(token)),
            Event::Finished { request, reason } => {
                let metrics = self.engine.executor().metrics(request).unwrap_or_default();
                (request, Answer::Finished { reason, metrics })
            }
            Event::Refused { request, reason: error } | Event::Failed { request, error } => {
                tracing::warn!("request {request}: {error}");
                (request, Answer::Failed(error))
            }
        };
        let is_last = matches!(answer, Answer::Finished { .. } | Answer::Failed(_));
        if let Some(submission) = self.live.get(&request) {
            // A client that has gone cancels its request by itself.
            let _ = submission.answers.send(answer);
        }
        if is_last {
            self.live.remove(&request);
        }
    }
}

async fn accept_clients(listener: std::net::TcpListener, terms: Terms, submissions: Sender<Submission>) {
    accept_each(listener, MAX_CLIENTS, |stream, peer| {
        let (terms, submissions) = (terms.clone(), submissions.clone());
        async move {
            match accept(stream, Service::Decode, &terms).await {
                Ok(session) => {
                    if let Err(error) = serve(session, submissions, terms.timeout).await {
                        tracing::info!("{peer}: {error}");
                    }
                }
                // A client without the secret goes by itself.
                Err(error) => tracing::warn!("{peer}: no session was opened: {error}"),
            }
        }
    })
    .await;
}

/// Cancels a request when its client has gone.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

async fn serve(mut session: Session, submissions: Sender<Submission>, timeout: Duration) -> Result<(), SessionError> {
    let request = match session.next().await?.message {
        Message::Generate { max_new_tokens, sampling, stop_tokens, prompt } => GenerateRequest {
            prompt: prompt.into_iter().map(TokenId).collect(),
            max_new_tokens: max_new_tokens as usize,
            stop_tokens: stop_tokens.into_iter().map(TokenId).collect(),
            sampling,
        },
        other => return Err(SessionError::Unexpected { expected: "a request", found: other.name() }),
    };
    let cancelled = Arc::<AtomicBool>::default();
    let _cancel = CancelOnDrop(cancelled.clone());
    let (answers, arriving) = unbounded_channel();
    let refused = submissions.send(Submission { request, answers, cancelled }).is_err();
    if refused {
        let reason = "the node is shutting down".to_owned();
        return session.send(&Message::Refused { request: 0, reason }).await.map(drop);
    }
    relay(session, arriving, timeout).await
}

async fn relay(
    mut session: Session,
    mut arriving: UnboundedReceiver<Answer>,
    timeout: Duration,
) -> Result<(), SessionError> {
    let mut tick = interval((timeout / 4).clamp(Duration::from_millis(1), SIGN_OF_LIFE));
    let mut progress = (0, 0);
    loop {
        let answer = tokio::select! {
            answer = arriving.recv() => answer.unwrap_or_else(|| Answer::Failed("the node is shutting down".to_owned())),
            _ = tick.tick() => {
                let (done, total) = progress;
                session.post(&Message::Progress { request: 0, done, total })?;
                continue;
            }
            // Clients say nothing: either they are gone, or they speak out of turn.
            received = session.next() => {
                let found = received?.message.name();
                return Err(SessionError::Unexpected { expected: "nothing after a request", found });
            }
        };
        let message = match answer {
            Answer::Progress { done, total } => {
                progress = (done, total);
                continue;
            }
            Answer::Token(token) => Message::Token { token: token.0 },
            Answer::Finished { reason, metrics } => {
                let stopped = reason == FinishReason::Stop;
                return session.send(&Message::Finished { stopped, metrics }).await.map(drop);
            }
            Answer::Failed(reason) => return session.send(&Message::Refused { request: 0, reason }).await.map(drop),
        };
        session.send(&message).await?;
    }
}
