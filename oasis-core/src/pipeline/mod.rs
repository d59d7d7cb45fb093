//! The asynchronous pipeline of the background stages (paper, section 4.2.2).
//!
//! Three persistent workers run *predict*, *select* and *transfer*. A task carries the device memory of its (layer,
//! batch) from the foreground through the stages and back, so that no two threads can touch it at once: what the paper
//! does with events, ownership does here. The foreground hands in the summaries as soon as the queries exist, the
//! slots when attention has read them, and before the same layer's attention of the next step it waits for that layer
//! alone.

mod link;
mod metrics;
mod predict;
mod rules;
mod select;
mod stage;
mod trace;
mod transfer;

pub use link::LinkMeter;
pub use metrics::{PipelineMetrics, StageMetrics};
pub use rules::{RankMember, SelectMember, Selected, rank, select, summarize};
pub use stage::{Stage, StageError, WorkerPriority};
pub use trace::{Span, Tracer, Track};
pub use transfer::{Offload, OffloadBlocks};

use crate::geometry::KvGeometry;
use crate::ids::{BlockId, LayerId, RequestId, Step};
use crate::memory::{EntryKey, FetchedEntries, KvStore, LayerCache, Resident, StoreError, Summaries, Transport};
use crate::policy::{Correction, LinkRate, Predictor, QuerySource, Selector, Summarizer};
use crate::working_set::Ranking;
use metrics::Meter;
use predict::PredictStage;
use select::{SelectMessage, SelectStage};
use stage::Worker;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;
use transfer::{TransferMessage, TransferStage};

/// What a pipeline is built from.
pub struct PipelineParts {
    /// Shape of the cache.
    pub geometry: KvGeometry,
    /// Blocks wanted per KV head, K.
    pub budget: usize,
    /// Summarises completed blocks and scores queries.
    pub summarizer: Arc<dyn Summarizer>,
    /// Ranks blocks.
    pub predictor: Box<dyn Predictor>,
    /// Plans admissions.
    pub selector: Box<dyn Selector>,
    /// Moves admitted entries.
    pub transport: Box<dyn Transport>,
    /// Holds the full KV.
    pub store: Arc<dyn KvStore>,
    /// How the workers are scheduled.
    pub priority: WorkerPriority,
    /// Receives the spans of every stage.
    pub tracer: Tracer,
}

/// One request's part of a [`PredictTask`].
pub struct PredictMember {
    /// Request.
    pub request: RequestId,
    /// Query of the predictor's source, `[kv_heads][group][head_dim]`.
    pub query: Vec<f32>,
    /// Keys of a tail block that this step completed, `[kv_heads][block_tokens][head_dim]`: summarised first.
    pub completed_keys: Option<Vec<f32>>,
    /// The request's summaries in this layer.
    pub summaries: Summaries,
}

/// First half of a layer's background work: summaries and queries.
pub struct PredictTask {
    /// Layer.
    pub layer: LayerId,
    /// Step.
    pub step: Step,
    /// Requests of the batch.
    pub members: Vec<PredictMember>,
}

/// Second half of a layer's background work: the slots, once attention has read them. Members are those of the
/// [`PredictTask`] of the same layer, in the same order.
pub struct SelectTask {
    /// Layer.
    pub layer: LayerId,
    /// Step.
    pub step: Step,
    /// Slots, working set and tail of each request.
    pub members: Vec<Resident>,
}

/// One request's device memory, back from the stages.
pub struct Returned {
    /// Request.
    pub request: RequestId,
    /// Its summaries and slots in the layer.
    pub cache: LayerCache,
    /// Entries of a first working set that crossed the link, not limited by the cap.
    pub filled: usize,
    /// Entries that the selector admitted and that crossed the link.
    pub admitted: usize,
    /// Wanted entries that are not resident now: the cap kept them out.
    pub deferred: usize,
    /// The tail block that the step completed.
    pub completed: Option<BlockId>,
    /// Why a stage failed; the slots may hold anything then.
    pub error: Option<StageError>,
}

/// A layer's background work, done.
pub struct LayerDone {
    /// Layer.
    pub layer: LayerId,
    /// Step.
    pub step: Step,
    /// What was wanted.
    pub ranking: Ranking,
    /// What the selector was told of the link.
    pub link: Option<LinkRate>,
    /// Requests of the batch.
    pub members: Vec<Returned>,
}

/// The coordinator: owns the three workers and what is in flight.
pub struct Pipeline {
    query_source: QuerySource,
    correction: Option<Correction>,
    cap: usize,
    predict: Worker<PredictTask>,
    select: Worker<SelectMessage>,
    transfer: Worker<TransferMessage>,
    /// One mailbox a layer.
    done: Vec<Receiver<LayerDone>>,
    in_flight: Vec<bool>,
    meter: Arc<Meter>,
    tracer: Tracer,
}

impl Pipeline {
    /// Starts the workers.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn start(parts: PipelineParts) -> std::io::Result<Self> {
        let query_source = parts.predictor.query_source();
        let correction = parts.predictor.correction();
        let link = Arc::new(LinkMeter::default());
        let cap = parts.selector.cap(parts.budget).min(parts.budget);
        let meter = Arc::new(Meter::default());
        let (home, done): (Vec<Sender<LayerDone>>, _) = (0..parts.geometry.layers).map(|_| channel()).unzip();
        let stages = || (meter.clone(), parts.tracer.clone());

        let transfer = {
            let (meter, tracer) = stages();
            let mut stage =
                TransferStage::new(parts.geometry, parts.transport, parts.store, home, tracer, link.clone())?;
            Worker::start(Stage::Transfer, meter, parts.priority, move |message| stage.run(message))?
        };
        let select = {
            let (meter, tracer) = stages();
            let next = transfer.sender();
            let mut stage = SelectStage::new(parts.geometry.kv_heads, parts.budget, parts.selector, tracer, next, link);
            Worker::start(Stage::Select, meter, parts.priority, move |message| stage.run(message))?
        };
        let predict = {
            let (meter, tracer) = stages();
            let next = select.sender();
            let mut stage =
                PredictStage::new(parts.geometry, parts.budget, parts.summarizer, parts.predictor, tracer, next);
            Worker::start(Stage::Predict, meter, parts.priority, move |task| stage.run(task))?
        };
        let in_flight = vec![false; parts.geometry.layers];
        Ok(Self {
            query_source,
            correction,
            cap,
            predict,
            select,
            transfer,
            done,
            in_flight,
            meter,
            tracer: parts.tracer,
        })
    }

    /// Whose query the predictor wants.
    pub fn query_source(&self) -> QuerySource {
        self.query_source
    }

    /// When a choice that the predictor makes ahead is made again.
    pub fn correction(&self) -> Option<Correction> {
        self.correction
    }

    /// Most admissions a KV head and step, C.
    pub fn cap(&self) -> usize {
        self.cap
    }

    /// Hands in a layer's queries and summaries.
    ///
    /// # Panics
    /// When the layer is still in flight.
    pub fn predict(&mut self, task: PredictTask) {
        let layer = task.layer.index();
        assert!(!self.in_flight[layer], "layer {layer} was not waited for");
        self.in_flight[layer] = true;
        self.predict.send(task);
    }

    /// Hands in the layer's slots, after its attention has read them.
    pub fn select(&self, task: SelectTask) {
        self.select.send(SelectMessage::Resident(task));
    }

    /// Whether the layer's device memory is with the stages.
    pub fn is_in_flight(&self, layer: LayerId) -> bool {
        self.in_flight[layer.index()]
    }

    /// Waits for one layer and takes its device memory back; `None` when nothing is in flight there.
    pub fn wait(&mut self, layer: LayerId) -> Option<LayerDone> {
        if !std::mem::take(&mut self.in_flight[layer.index()]) {
            return None;
        }
        let start = Instant::now();
        // A worker outlives its panicking policy, so the answer always comes.
        let done = self.done[layer.index()].recv().expect("the transfer worker lives as long as the pipeline");
        self.meter.waited(start.elapsed());
        self.tracer.record(Track::Foreground, "wait", layer, done.step, start);
        Some(done)
    }

    /// Writes completed blocks of a prefill to the store, behind the foreground's back.
    pub fn offload(&self, blocks: OffloadBlocks) -> Offload {
        let (reply, result) = channel();
        self.transfer.send(TransferMessage::Offload { blocks, reply });
        Offload::new(result)
    }

    /// Reads entries from the store and waits for them: the first decode step's view of the full KV.
    ///
    /// # Errors
    /// The store's.
    pub fn fetch(&self, keys: Vec<EntryKey>) -> Result<FetchedEntries, StoreError> {
        let (reply, result) = channel();
        self.transfer.send(TransferMessage::Fetch { keys, reply });
        result.recv().expect("the transfer worker lives as long as the pipeline")
    }

    /// Stage times and queue depths so far.
    pub fn metrics(&self) -> PipelineMetrics {
        self.meter.snapshot()
    }
}

#[cfg(test)]
mod tests;
