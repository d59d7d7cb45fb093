//! A client of a decode node.

use anyhow::Context;
use oasis_core::engine::GenerateRequest;
use oasis_core::ids::TokenId;
use oasis_transport::remote::{Message, NodeMetrics, Service, Session, SessionError, Terms, connect};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

/// What a node says of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeAnswer {
    /// Token-layers of the prompt read, and of all.
    Progress {
        /// Done.
        done: u64,
        /// Of all.
        total: u64,
    },
    /// The next token.
    Token(TokenId),
    /// The answer is complete.
    Finished {
        /// A stop token came.
        stopped: bool,
        /// What it cost.
        metrics: NodeMetrics,
    },
    /// The request could not go on.
    Failed(String),
}

/// One request to a decode node. Dropping it cancels the request.
pub struct NodeClient {
    // Before the runtime that serves it.
    session: Session,
    runtime: Runtime,
    address: String,
    timeout: Duration,
    heard: Instant,
}

impl NodeClient {
    /// Sends a request.
    ///
    /// # Errors
    /// When the node cannot be reached in time, or refuses the client: another model, or another secret.
    pub fn submit(address: &str, terms: &Terms, request: &GenerateRequest) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let ids = |tokens: &[TokenId]| tokens.iter().map(|token| token.0).collect();
        let message = Message::Generate {
            max_new_tokens: u32::try_from(request.max_new_tokens).unwrap_or(u32::MAX),
            sampling: request.sampling,
            stop_tokens: ids(&request.stop_tokens),
            prompt: ids(&request.prompt),
        };
        let open = async {
            let session = connect(address, Service::Decode, terms).await?;
            session.send(&message).await?;
            Ok::<_, SessionError>(session)
        };
        let session = runtime.block_on(open).with_context(|| format!("decode node {address}"))?;
        Ok(Self { session, runtime, address: address.to_owned(), timeout: terms.timeout, heard: Instant::now() })
    }

    /// Waits for the next answer, at most `patience`; `None` when there is none yet.
    ///
    /// # Errors
    /// When the node is gone, or silent for longer than the deadline of an operation.
    pub fn next(&mut self, patience: Duration) -> anyhow::Result<Option<NodeAnswer>> {
        let Self { session, runtime, .. } = self;
        let received = match runtime.block_on(async { tokio::time::timeout(patience, session.next()).await }) {
            Ok(received) => received,
            Err(_) if self.heard.elapsed() < self.timeout => return Ok(None),
            Err(_) => Err(SessionError::TimedOut { what: "waiting for a token", after: self.timeout }),
        };
        let received = received.with_context(|| format!("decode node {}", self.address))?;
        self.heard = Instant::now();
        Ok(Some(match received.message {
            Message::Progress { done, total, .. } => NodeAnswer::Progress { done, total },
            Message::Token { token } => NodeAnswer::Token(TokenId(token)),
            Message::Finished { stopped, metrics } => NodeAnswer::Finished { stopped, metrics },
            Message::Refused { reason, .. } => NodeAnswer::Failed(reason),
            other => anyhow::bail!("decode node {}: expected a token, found `{}`", self.address, other.name()),
        }))
    }
}
