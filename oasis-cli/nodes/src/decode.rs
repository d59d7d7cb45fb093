//! The decode node's executor: prompts are read elsewhere, and blocks come when they are needed.

use crate::io::IoThread;
use oasis_core::executor::{
    Admission, DecodeRow, Executor, ExecutorInfo, ExecutorStats, PrefillProgress, RequestError, Sequence,
};
use oasis_core::geometry::KvGeometry;
use oasis_core::hand_over::{HandsOver, LayerHandOver};
use oasis_core::ids::{BlockId, LayerId, RequestId, TokenId};
use oasis_core::memory::KvStore;
use oasis_transport::remote::{
    Arrived, BlockReader, NodeMetrics, OneSidedReader, PeerEvent, PeerOptions, PrefillPeer, RemoteStore, RequestTraffic,
};
use oasis_ucx::Engine;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::AbortHandle;

/// How long an executor that has nothing else to do waits for news of a prompt at a time.
const PATIENCE: Duration = Duration::from_millis(5);
/// Prompts that the prefill node is asked for at a time: it reads them in turn, and others cross meanwhile.
const PROMPTS_AT_ONCE: usize = 8;
/// Requests whose metrics are kept for whoever asks.
const REMEMBERED: usize = 1024;

/// What crosses before a request decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransferMode {
    /// Every block of the prompt.
    Full,
    /// The blocks that the first decode step chose; others when a step misses them.
    Partial,
}

/// Settings of a decode node's executor.
#[derive(Debug, Clone)]
pub struct DecodeOptions {
    /// The prefill node.
    pub peer: PeerOptions,
    /// UCX, where blocks are read from the prefill node's memory; without it, they come as messages.
    pub ucx: Option<Engine>,
    /// What crosses at admission.
    pub transfer: TransferMode,
    /// Most time from the submission of a prompt to its first token.
    pub prefill_timeout: Duration,
}

/// Runs decode steps of requests whose prompts a prefill node reads, on an executor that takes them over. It says token for
/// token what that executor says alone.
pub struct DecodeExecutor<E> {
    inner: E,
    store: Arc<RemoteStore>,
    peer: Arc<PrefillPeer>,
    /// How blocks get here.
    reader: Arc<dyn BlockReader>,
    transfer: TransferMode,
    prefill_timeout: Duration,
    /// Requests whose prompt is being read, or whose blocks are on their way.
    arriving: BTreeMap<RequestId, Arriving>,
    decoding: BTreeSet<RequestId>,
    /// Requests whose first decode step was run by the prefill node: the token it ran, and the one it gave.
    ahead: BTreeMap<RequestId, (TokenId, TokenId)>,
    state_bytes: BTreeMap<RequestId, u64>,
    ended: VecDeque<(RequestId, NodeMetrics)>,
    // Last: the others speak through it.
    io: IoThread,
}

struct Arriving {
    news: Receiver<News>,
    task: AbortHandle,
    since: Instant,
    progress: PrefillProgress,
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What the task of an arriving request reports.
enum News {
    Progress { done: u64, total: u64 },
    Arrived(Box<Arrived>),
    Failed(String),
}

impl<E: HandsOver> DecodeExecutor<E> {
    /// Starts an executor that `start` makes of the store: what has crossed lies in `blocks`.
    ///
    /// # Errors
    /// When the machine gives no threads, or `start` fails.
    pub fn start(
        options: DecodeOptions,
        blocks: Arc<dyn KvStore>,
        start: impl FnOnce(Arc<dyn KvStore>) -> anyhow::Result<E>,
    ) -> anyhow::Result<Self> {
        let io = IoThread::start("oasis-decode-io")?;
        let DecodeOptions { peer, ucx, transfer, prefill_timeout } = options;
        let PeerOptions { address, terms, .. } = peer.clone();
        let peer = PrefillPeer::start(io.handle(), peer, ucx.is_some());
        let reader: Arc<dyn BlockReader> = match ucx {
            None => peer.clone(),
            Some(ucx) => Arc::new(OneSidedReader::new(peer.clone(), address, ucx, terms.timeout)?),
        };
        let store = Arc::new(RemoteStore::new(blocks, reader.clone()));
        let inner = start(store.clone())?;
        anyhow::ensure!(
            inner.info().budget_blocks.is_some(),
            "nodes: expected sparse decoding, found kv.budget_blocks = \"all\"\n  hint: set a number of blocks"
        );
        Ok(Self {
            inner,
            store,
            peer,
            reader,
            transfer,
            prefill_timeout,
            arriving: BTreeMap::new(),
            decoding: BTreeSet::new(),
            ahead: BTreeMap::new(),
            state_bytes: BTreeMap::new(),
            ended: VecDeque::new(),
            io,
        })
    }

    /// The executor that computes.
    pub fn inner(&self) -> &E {
        &self.inner
    }

    /// The store, for what has crossed so far.
    pub fn store(&self) -> &RemoteStore {
        &self.store
    }

    /// What a request has cost so far, or in all when it has ended; `None` for one of long ago.
    pub fn metrics(&self, request: RequestId) -> Option<NodeMetrics> {
        let ended = self.ended.iter().find(|(ended, _)| *ended == request).map(|(_, metrics)| *metrics);
        ended.or_else(|| {
            let RequestTraffic {
                admission_bytes,
                miss_bytes,
                blocks,
                misses,
                prompt_blocks,
                block_bytes,
                resident_bytes,
            } = self.store.traffic(request)?;
            let state_bytes = self.state_bytes.get(&request).copied().unwrap_or(0);
            Some(NodeMetrics {
                state_bytes,
                admission_bytes,
                miss_bytes,
                blocks,
                prompt_blocks,
                block_bytes,
                misses,
                resident_bytes,
            })
        })
    }

    fn take_over(&mut self, request: RequestId, arrived: &Arrived) -> Result<PrefillProgress, RequestError> {
        self.state_bytes.insert(request, arrived.bytes);
        if let Some((token, state)) = &arrived.second {
            self.inner.take_over(request, state)?;
            self.ahead.insert(request, (arrived.first, *token));
        }
        self.decoding.insert(request);
        Ok(PrefillProgress::Done(arrived.first))
    }

    /// Answers a row whose step the prefill node has run; `None` for others.
    fn already_run(&mut self, row: DecodeRow) -> Option<Result<TokenId, RequestError>> {
        let (ran, next) = *self.ahead.get(&row.request)?;
        if ran != row.token {
            return Some(Err(RequestError(format!(
                "request {}: expected the token {ran}, which the prefill node has run, found {}",
                row.request, row.token
            ))));
        }
        self.ahead.remove(&row.request);
        Some(Ok(next))
    }
}

impl<E: HandsOver> Executor for DecodeExecutor<E> {
    fn info(&self) -> &ExecutorInfo {
        self.inner.info()
    }

    fn admit(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        let Sequence { request, prompt, max_new_tokens, sampling } = sequence.clone();
        let admission = self.inner.expect(sequence)?;
        if admission != Admission::Admitted {
            return Ok(admission);
        }
        let prompt_tokens = prompt.len();
        let events = self.peer.prefill(request, prompt, max_new_tokens, sampling);
        let (reports, news) = channel();
        let task = Task {
            request,
            prompt_tokens,
            geometry: self.inner.info().geometry,
            transfer: self.transfer,
            store: self.store.clone(),
            reader: self.reader.clone(),
        };
        let task = self.io.handle().spawn(task.run(events, reports)).abort_handle();
        let progress = PrefillProgress::Running { done: 0, total: self.inner.info().geometry.layers * prompt_tokens };
        self.arriving.insert(request, Arriving { news, task, since: Instant::now(), progress });
        Ok(Admission::Admitted)
    }

    fn prefill(&mut self, request: RequestId) -> Result<PrefillProgress, RequestError> {
        let Some(arriving) = self.arriving.get_mut(&request) else {
            return Err(RequestError(format!("request {request}: expected a prompt that is being read, found none")));
        };
        // Others decode meanwhile.
        let patience = if self.decoding.is_empty() { PATIENCE } else { Duration::ZERO };
        match arriving.news.recv_timeout(patience) {
            Ok(News::Progress { done, total }) => {
                let tokens = |count| usize::try_from(count).unwrap_or(usize::MAX);
                arriving.progress = PrefillProgress::Running { done: tokens(done), total: tokens(total).max(1) };
                Ok(arriving.progress)
            }
            Ok(News::Arrived(arrived)) => {
                self.arriving.remove(&request);
                self.take_over(request, &arrived)
            }
            Ok(News::Failed(problem)) => Err(RequestError(format!("request {request}: {problem}"))),
            Err(RecvTimeoutError::Timeout) if arriving.since.elapsed() < self.prefill_timeout => Ok(arriving.progress),
            Err(RecvTimeoutError::Timeout) => Err(RequestError(format!(
                "request {request}: no first token within {} s",
                self.prefill_timeout.as_secs_f64()
            ))),
            Err(RecvTimeoutError::Disconnected) => {
                Err(RequestError(format!("request {request}: the node is shutting down")))
            }
        }
    }

    fn prompts_at_once(&self) -> usize {
        PROMPTS_AT_ONCE
    }

    fn decode(&mut self, rows: &[DecodeRow]) -> anyhow::Result<Vec<Result<TokenId, RequestError>>> {
        let mut results: Vec<_> = rows.iter().map(|&row| self.already_run(row)).collect();
        let waiting: Vec<DecodeRow> =
            rows.iter().zip(&results).filter(|(_, result)| result.is_none()).map(|(row, _)| *row).collect();
        let mut decoded = match waiting.is_empty() {
            true => Vec::new(),
            false => self.inner.decode(&waiting)?,
        }
        .into_iter();
        Ok(results.iter_mut().map(|result| result.take().or_else(|| decoded.next()).expect("one a row")).collect())
    }

    fn release(&mut self, request: RequestId) {
        let was_arriving = self.arriving.remove(&request).is_some();
        if self.decoding.remove(&request) | was_arriving
            && let Some(metrics) = self.metrics(request)
        {
            self.ended.push_back((request, metrics));
            if self.ended.len() > REMEMBERED {
                self.ended.pop_front();
            }
        }
        self.ahead.remove(&request);
        self.state_bytes.remove(&request);
        // The store tells the peer.
        self.inner.release(request);
        if was_arriving {
            self.reader.release(request);
        }
    }

    fn stats(&self) -> ExecutorStats {
        self.inner.stats()
    }
}

/// Follows one request from the prompt to its blocks.
struct Task {
    request: RequestId,
    prompt_tokens: usize,
    geometry: KvGeometry,
    transfer: TransferMode,
    store: Arc<RemoteStore>,
    reader: Arc<dyn BlockReader>,
}

impl Task {
    async fn run(self, mut events: UnboundedReceiver<PeerEvent>, news: Sender<News>) {
        while let Some(event) = events.recv().await {
            let (report, is_last) = match event {
                PeerEvent::Progress { done, total } => (News::Progress { done, total }, false),
                PeerEvent::Failed(problem) => (News::Failed(problem), true),
                PeerEvent::Arrived(arrived) => match self.bring(&arrived).await {
                    Ok(()) => (News::Arrived(arrived), true),
                    Err(problem) => (News::Failed(problem), true),
                },
            };
            // The executor may have given the request up.
            if news.send(report).is_err() || is_last {
                return;
            }
        }
    }

    /// Brings the blocks that the next step reads, or all.
    async fn bring(&self, arrived: &Arrived) -> Result<(), String> {
        let Some((_, state)) = &arrived.second else { return Ok(()) };
        let expected = self.prompt_tokens + 1;
        if state.position() != expected {
            return Err(format!("expected a state of {expected} tokens, found one of {}", state.position()));
        }
        let geometry = &self.geometry;
        self.reader.granted(self.request, geometry.block_bytes(), arrived.lent.as_ref()).await?;
        // What does not fit is refused when it is taken over.
        let blocks = state.stored_blocks(geometry);
        let wanted = |(layer, (state, &blocks)): (usize, (&LayerHandOver, &usize))| {
            let wanted = match self.transfer {
                TransferMode::Full => (0..blocks).map(BlockId::from).collect(),
                TransferMode::Partial => state.union(blocks),
            };
            (LayerId::from(layer), wanted)
        };
        let layers = state.layers.iter().zip(&blocks).enumerate().map(wanted).collect();
        self.store.grant(self.request, blocks);
        self.store.admit(self.request, layers).await.map_err(|error| error.to_string())
    }
}
