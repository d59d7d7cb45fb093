//! A TCP connection that both ends have agreed to: who may connect, what must be the same, and framed messages.

use super::codec::WireError;
use super::error::SessionError;
use super::message::{Fact, Message, Service, WIRE_VERSION};
use super::secret::Secret;
use super::tls::{Stream, Tls};
use std::fmt::Display;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Most bytes of a message: one layer's summaries of a long prompt fit many times over.
const MAX_MESSAGE: usize = 1 << 30;
/// Most bytes of a message before the peer has proved that it knows the secret.
const MAX_GREETING: usize = 64 << 10;
/// Memory that a length alone takes; more comes as bytes do.
const FIRST_BYTES: usize = 1 << 20;
/// Messages that wait to be handled; then the peer waits.
const QUEUE: usize = 8;

/// What an end of a session brings to it.
#[derive(Debug, Clone)]
pub struct Terms {
    /// Both ends must know the same; none is a secret too.
    pub secret: Secret,
    /// Whether what is said is encrypted, and how a server shows who it is.
    pub tls: Tls,
    /// Both ends must state the same, in the same order.
    pub facts: Vec<Fact>,
    /// Most time that opening takes, that a message takes to be written, and that it stands still while it arrives.
    pub timeout: Duration,
}

/// A message with its size on the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct Received {
    /// Message.
    pub message: Message,
    /// Bytes, length included.
    pub bytes: u64,
}

/// An open session. Dropping it closes the connection, once what was sent is on its way.
pub struct Session {
    incoming: mpsc::Receiver<Result<Received, SessionError>>,
    outgoing: mpsc::UnboundedSender<Outgoing>,
    reader: JoinHandle<()>,
}

struct Outgoing {
    bytes: Vec<u8>,
    written: Option<oneshot::Sender<()>>,
}

impl Session {
    fn start(stream: Stream, timeout: Duration) -> Self {
        match stream {
            Stream::Plain(stream) => {
                let (reader, writer) = stream.into_split();
                Self::over(reader, writer, timeout)
            }
            Stream::Tls(stream) => {
                let (reader, writer) = tokio::io::split(stream);
                Self::over(reader, writer, timeout)
            }
        }
    }

    fn over(
        reader: impl AsyncRead + Unpin + Send + 'static,
        writer: impl AsyncWrite + Unpin + Send + 'static,
        timeout: Duration,
    ) -> Self {
        let (sender, incoming) = mpsc::channel(QUEUE);
        let (outgoing, queue) = mpsc::unbounded_channel();
        tokio::spawn(write_all(writer, queue, sender.clone(), timeout));
        let reader = tokio::spawn(read_all(reader, sender, timeout));
        Self { incoming, outgoing, reader }
    }

    fn enqueue(&self, message: &Message, written: Option<oneshot::Sender<()>>) -> Result<u64, SessionError> {
        let bytes = message.encode();
        if bytes.len() > MAX_MESSAGE {
            let found = format!("{} bytes", bytes.len());
            return Err(WireError::new(format!("a message of at most {MAX_MESSAGE} bytes"), found).into());
        }
        let size = 4 + bytes.len() as u64;
        self.outgoing.send(Outgoing { bytes, written }).map_err(|_| SessionError::Closed)?;
        Ok(size)
    }

    /// Sends a message behind the caller's back; [`next`](Self::next) tells when that failed. Gives its size on the wire
    /// in bytes.
    ///
    /// # Errors
    /// [`SessionError`]: the session is of no use any more.
    pub fn post(&self, message: &Message) -> Result<u64, SessionError> {
        self.enqueue(message, None)
    }

    /// Sends a message and waits until the system has taken it; gives its size on the wire in bytes.
    ///
    /// # Errors
    /// [`SessionError`]: the session is of no use any more.
    pub async fn send(&self, message: &Message) -> Result<u64, SessionError> {
        let (written, done) = oneshot::channel();
        let size = self.enqueue(message, Some(written))?;
        done.await.map_err(|_| SessionError::Closed)?;
        Ok(size)
    }

    /// The next message. Nothing is lost when the future is dropped.
    ///
    /// # Errors
    /// [`SessionError`]: the session is of no use any more.
    pub async fn next(&mut self) -> Result<Received, SessionError> {
        self.incoming.recv().await.unwrap_or(Err(SessionError::Closed))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

async fn write_all(
    mut writer: impl AsyncWrite + Unpin,
    mut queue: mpsc::UnboundedReceiver<Outgoing>,
    failures: mpsc::Sender<Result<Received, SessionError>>,
    limit: Duration,
) {
    while let Some(Outgoing { bytes, written }) = queue.recv().await {
        if let Err(error) = write(&mut writer, &bytes, limit).await {
            let _ = failures.send(Err(error)).await;
            return;
        }
        if let Some(written) = written {
            let _ = written.send(());
        }
    }
    // The peer may have gone before.
    let _ = timeout(limit, writer.shutdown()).await;
}

async fn read_all(
    mut reader: impl AsyncRead + Unpin,
    sender: mpsc::Sender<Result<Received, SessionError>>,
    limit: Duration,
) {
    loop {
        let received = read(&mut reader, MAX_MESSAGE, limit).await;
        let failed = received.is_err();
        if sender.send(received).await.is_err() || failed {
            return;
        }
    }
}

/// Reads a message. It may be long in coming, but not stand still once it has begun.
async fn read(reader: &mut (impl AsyncRead + Unpin), limit: usize, stall: Duration) -> Result<Received, SessionError> {
    let late = |_| SessionError::TimedOut { what: "the rest of a message", after: stall };
    let mut length = [0; 4];
    reader.read_exact(&mut length[..1]).await?;
    timeout(stall, reader.read_exact(&mut length[1..])).await.map_err(late)??;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(WireError::new(format!("a message of at most {limit} bytes"), format!("{length} bytes")).into());
    }
    let mut bytes = Vec::with_capacity(length.min(FIRST_BYTES));
    while bytes.len() < length {
        let missing = length - bytes.len();
        if bytes.len() == bytes.capacity() {
            bytes.reserve_exact(missing.min(bytes.len()));
        }
        let mut part = (&mut *reader).take(missing as u64);
        if timeout(stall, part.read_buf(&mut bytes)).await.map_err(late)?? == 0 {
            return Err(SessionError::Closed);
        }
    }
    Ok(Received { message: Message::decode(&bytes)?, bytes: 4 + length as u64 })
}

async fn write(writer: &mut (impl AsyncWrite + Unpin), bytes: &[u8], limit: Duration) -> Result<(), SessionError> {
    let length = u32::try_from(bytes.len()).expect("below the limit of a message").to_le_bytes();
    let late = |_| SessionError::TimedOut { what: "sending a message", after: limit };
    timeout(limit, writer.write_all(&length)).await.map_err(late)??;
    // A large message on a slow link may take its time, as long as it moves.
    for piece in bytes.chunks(FIRST_BYTES) {
        timeout(limit, writer.write_all(piece)).await.map_err(late)??;
    }
    // What encrypts holds back what it has.
    timeout(limit, writer.flush()).await.map_err(late)??;
    Ok(())
}

/// An end's own name goes into its proof, so that no proof can be sent back to who made it.
const SERVER: &[u8] = b"oasis node, server";
const CLIENT: &[u8] = b"oasis node, client";

const WRONG_SECRET: &str = "the shared secrets differ, or only one end has one";

fn nonce() -> Result<[u8; 32], SessionError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|error| SessionError::Network(format!("no random numbers: {error}")))?;
    Ok(nonce)
}

fn unexpected(expected: &'static str, message: &Message) -> SessionError {
    match message {
        Message::Refused { reason, .. } => SessionError::Refused(reason.clone()),
        other => SessionError::Unexpected { expected, found: other.name() },
    }
}

/// Opens a session for `service` with a node at `host:port`, over TLS where authorities are named.
///
/// # Errors
/// When nobody answers in time, the node's certificate is not good, the secrets differ, or the node assumes something
/// else.
pub async fn connect(
    address: impl ToSocketAddrs + Display,
    service: Service,
    terms: &Terms,
) -> Result<Session, SessionError> {
    let open = async {
        let name = address.to_string();
        let host = name.rsplit_once(':').map_or(name.as_str(), |(host, _)| host);
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut stream = terms.tls.connect(stream, host.trim_matches(['[', ']'])).await?;
        match &mut stream {
            Stream::Plain(stream) => introduce(stream, service, terms).await?,
            Stream::Tls(stream) => introduce(stream, service, terms).await?,
        }
        Ok(Session::start(stream, terms.timeout))
    };
    let late = |_| SessionError::TimedOut { what: "opening a session", after: terms.timeout };
    timeout(terms.timeout, open).await.map_err(late)?
}

/// The client's end of the greeting.
async fn introduce(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    service: Service,
    terms: &Terms,
) -> Result<(), SessionError> {
    let ours = nonce()?;
    send_greeting(stream, &Message::Hello { version: WIRE_VERSION, service, nonce: ours }).await?;
    let theirs = match read_greeting(stream, terms).await? {
        Message::Challenge { nonce: theirs, proof } => {
            if !terms.secret.verifies(&[SERVER, &ours, &theirs], &proof) {
                return Err(SessionError::Refused(WRONG_SECRET.to_owned()));
            }
            theirs
        }
        other => return Err(unexpected("a challenge", &other)),
    };
    let proof = terms.secret.proof(&[CLIENT, &ours, &theirs]);
    send_greeting(stream, &Message::Proof { proof, facts: terms.facts.clone() }).await?;
    match read_greeting(stream, terms).await? {
        Message::Welcome => Ok(()),
        other => Err(unexpected("a welcome", &other)),
    }
}

/// Answers a client that has connected for `service`.
///
/// # Errors
/// When the client is silent, wants another service, does not know the secret, speaks plainly where TLS is required or the
/// other way round, or assumes something else: it is told.
pub async fn accept(stream: TcpStream, service: Service, terms: &Terms) -> Result<Session, SessionError> {
    stream.set_nodelay(true)?;
    let late = |_| SessionError::TimedOut { what: "opening a session", after: terms.timeout };
    let accepted = timeout(terms.timeout, terms.tls.accept(stream)).await.map_err(late)?;
    let mut stream = match accepted {
        Ok(stream) => stream,
        Err((told, error)) => {
            if let (Some(mut stream), SessionError::Refused(reason)) = (told, &error) {
                refuse(&mut stream, reason, terms).await;
            }
            return Err(error);
        }
    };
    match &mut stream {
        Stream::Plain(stream) => answer(stream, service, terms).await?,
        Stream::Tls(stream) => answer(stream, service, terms).await?,
    }
    Ok(Session::start(stream, terms.timeout))
}

async fn answer(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    service: Service,
    terms: &Terms,
) -> Result<(), SessionError> {
    let late = |_| SessionError::TimedOut { what: "opening a session", after: terms.timeout };
    let greeted = timeout(terms.timeout, greet(stream, service, terms)).await.map_err(late)?;
    if let Err(SessionError::Refused(reason)) = &greeted {
        refuse(stream, reason, terms).await;
    }
    greeted
}

/// Tells a client why it is not wanted; it may have gone.
async fn refuse(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), reason: &str, terms: &Terms) {
    let refused = Message::Refused { request: 0, reason: reason.to_owned() };
    let tell = async {
        send_greeting(stream, &refused).await?;
        stream.shutdown().await?;
        // Bytes that nobody has read would reset the connection before the reason is there.
        let mut rest = [0; 256];
        while stream.read(&mut rest).await? > 0 {}
        Ok::<_, SessionError>(())
    };
    let _ = timeout(terms.timeout, tell).await;
}

async fn greet(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ours: Service,
    terms: &Terms,
) -> Result<(), SessionError> {
    let client = match read_greeting(stream, terms).await? {
        Message::Hello { version, .. } if version != WIRE_VERSION => {
            let text =
                format!("protocol: expected version {WIRE_VERSION}, found {version}; both nodes need one release");
            return Err(SessionError::Refused(text));
        }
        Message::Hello { service, .. } if service != ours => {
            let text = format!("role: expected a client of a {} node, found one of a {}", ours.name(), service.name());
            return Err(SessionError::Refused(text));
        }
        Message::Hello { nonce, .. } => nonce,
        other => return Err(unexpected("a hello", &other)),
    };
    let server = nonce()?;
    let proof = terms.secret.proof(&[SERVER, &client, &server]);
    send_greeting(stream, &Message::Challenge { nonce: server, proof }).await?;
    match read_greeting(stream, terms).await? {
        Message::Proof { proof, .. } if !terms.secret.verifies(&[CLIENT, &client, &server], &proof) => {
            return Err(SessionError::Refused(WRONG_SECRET.to_owned()));
        }
        Message::Proof { facts, .. } => compare(&terms.facts, &facts).map_err(SessionError::Refused)?,
        other => return Err(unexpected("a proof", &other)),
    }
    send_greeting(stream, &Message::Welcome).await
}

/// The first thing that two ends do not agree on.
fn compare(ours: &[Fact], theirs: &[Fact]) -> Result<(), String> {
    let absent = Fact::new("", "nothing");
    for index in 0..ours.len().max(theirs.len()) {
        let (ours, theirs) = (ours.get(index).unwrap_or(&absent), theirs.get(index).unwrap_or(&absent));
        if ours != theirs {
            let name = if ours.name.is_empty() { &theirs.name } else { &ours.name };
            let is_other = ours.name != theirs.name && !ours.name.is_empty() && !theirs.name.is_empty();
            let found = if is_other { &theirs.name } else { &theirs.value };
            return Err(format!("{name}: expected {}, found {found}; both nodes need the same", ours.value));
        }
    }
    Ok(())
}

async fn send_greeting(stream: &mut (impl AsyncWrite + Unpin), message: &Message) -> Result<(), SessionError> {
    let bytes = message.encode();
    let length = u32::try_from(bytes.len()).expect("greetings are short").to_le_bytes();
    stream.write_all(&[&length[..], &bytes].concat()).await?;
    stream.flush().await?;
    Ok(())
}

async fn read_greeting(stream: &mut (impl AsyncRead + Unpin), terms: &Terms) -> Result<Message, SessionError> {
    Ok(read(stream, MAX_GREETING, terms.timeout).await?.message)
}

#[cfg(test)]
mod tests;
