//! Transfer: write completed blocks to the store, bring admitted entries into their slots.

use crate::geometry::KvGeometry;
use crate::ids::{BlockId, LayerId, RequestId, Step};
use crate::memory::{
    BlockWrite, EntryCopy, EntryKey, EntryTarget, FetchedEntries, KvStore, LayerCache, StoreError, Transport,
};
use crate::pipeline::link::LinkMeter;
use crate::pipeline::rules::Selected;
use crate::pipeline::stage::{Stage, StageError, guarded};
use crate::pipeline::{LayerDone, Returned, Tracer, Track};
use crate::policy::LinkRate;
use crate::working_set::Ranking;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

/// One request's part of a transfer.
pub(super) struct TransferMember {
    pub request: RequestId,
    pub cache: LayerCache,
    pub selected: Selected,
    /// The tail block that was stored.
    pub completed: Option<BlockId>,
    pub error: Option<StageError>,
}

impl TransferMember {
    pub fn new(request: RequestId, cache: LayerCache) -> Self {
        Self { request, cache, selected: Selected::default(), completed: None, error: None }
    }
}

pub(super) struct TransferTask {
    pub layer: LayerId,
    pub step: Step,
    pub ranking: Ranking,
    pub link: Option<LinkRate>,
    pub members: Vec<TransferMember>,
}

pub(super) enum TransferMessage {
    Transfer(TransferTask),
    Offload { blocks: OffloadBlocks, reply: Sender<Result<(), StoreError>> },
    Fetch { keys: Vec<EntryKey>, reply: Sender<Result<FetchedEntries, StoreError>> },
}

/// Completed blocks of a prefill.
pub struct OffloadBlocks {
    /// Request.
    pub request: RequestId,
    /// Layer.
    pub layer: LayerId,
    /// First block.
    pub first: BlockId,
    /// `[blocks][kv_heads][entry]`
    pub entries: Vec<f32>,
}

/// A write to the store in flight.
pub struct Offload(Receiver<Result<(), StoreError>>);

impl Offload {
    pub(super) fn new(result: Receiver<Result<(), StoreError>>) -> Self {
        Self(result)
    }

    /// Waits for the write.
    ///
    /// # Errors
    /// The store's.
    pub fn wait(self) -> Result<(), StoreError> {
        self.0.recv().expect("the transfer worker answers every offload")
    }
}

/// Runs an operation of the store, turning its panic into an error.
fn guarded_read_write<T>(operation: &'static str, f: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
    guarded(Stage::Transfer, f)
        .unwrap_or_else(|panic| Err(StoreError::Medium { operation, problem: panic.to_string() }))
}

pub(super) struct TransferStage {
    geometry: KvGeometry,
    transport: Box<dyn Transport>,
    store: Arc<dyn KvStore>,
    /// One mailbox a layer.
    home: Vec<Sender<LayerDone>>,
    tracer: Tracer,
    link: Arc<LinkMeter>,
    runtime: tokio::runtime::Runtime,
}

impl TransferStage {
    pub fn new(
        geometry: KvGeometry,
        transport: Box<dyn Transport>,
        store: Arc<dyn KvStore>,
        home: Vec<Sender<LayerDone>>,
        tracer: Tracer,
        link: Arc<LinkMeter>,
    ) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { geometry, transport, store, home, tracer, link, runtime })
    }

    /// Runs one message; `true` when it was a layer of a decode step.
    pub fn run(&mut self, message: TransferMessage) -> bool {
        match message {
            TransferMessage::Transfer(task) => {
                self.transfer(task);
                return true;
            }
            // A caller that no longer listens has given the request up.
            TransferMessage::Offload { blocks, reply } => {
                drop(reply.send(guarded_read_write("put", || self.offload(&blocks))));
            }
            TransferMessage::Fetch { keys, reply } => {
                let fetch = || self.runtime.block_on(self.store.fetch(&keys));
                drop(reply.send(guarded_read_write("fetch", fetch)));
            }
        }
        false
    }

    fn offload(&self, blocks: &OffloadBlocks) -> Result<(), StoreError> {
        let start = Instant::now();
        let block_elements = self.geometry.kv_heads * self.geometry.entry_elements();
        let writes: Vec<BlockWrite<'_>> = (blocks.entries.chunks_exact(block_elements).enumerate())
            .map(|(i, entries)| BlockWrite {
                block: BlockId::from(blocks.first.index() + i),
                bytes: bytemuck::cast_slice(entries),
            })
            .collect();
        let result = self.runtime.block_on(self.store.put(blocks.request, blocks.layer, &writes));
        self.tracer.record(Track::Transfer, "offload", blocks.layer, Step(0), start);
        result
    }

    fn transfer(&mut self, task: TransferTask) {
        let start = Instant::now();
        let TransferTask { layer, step, ranking, link, mut members } = task;
        for member in members.iter_mut().filter(|m| m.error.is_none()) {
            if let Err(error) = guarded(Stage::Transfer, || self.complete_tail(layer, member)).flatten() {
                member.error = Some(error);
            }
        }
        if self.gather_guarded(layer, &mut members).is_err() {
            // One request's fault must not end the others: find out whose it is.
            for member in members.iter_mut().filter(|m| m.error.is_none()) {
                if let Err(error) = self.gather_guarded(layer, std::slice::from_mut(member)) {
                    member.error = Some(error);
                }
            }
        }
        let members = members.into_iter().map(|m| Returned {
            request: m.request,
            cache: m.cache,
            filled: m.selected.filled(),
            admitted: m.selected.admitted(),
            deferred: m.selected.deferred,
            completed: m.completed,
            error: m.error,
        });
        let done = LayerDone { layer, step, ranking, link, members: members.collect() };
        self.tracer.record(Track::Transfer, "transfer", layer, step, start);
        // The mailbox is gone only while the pipeline is being dropped.
        let _ = self.home[layer.index()].send(done);
    }

    /// Stores a full tail block, copies it to its slots and starts the next one.
    fn complete_tail(&self, layer: LayerId, member: &mut TransferMember) -> Result<(), StageError> {
        let resident = &mut member.cache.resident;
        if !resident.tail.is_full() {
            return Ok(());
        }
        let block = resident.tail.block();
        let write = BlockWrite { block, bytes: bytemuck::cast_slice(resident.tail.entries()) };
        (self.runtime.block_on(self.store.put(member.request, layer, &[write])))
            .map_err(|error| StageError::Transfer(error.to_string()))?;
        for (head, slot) in member.selected.take_completed(block) {
            resident.copy_tail_to(head, slot);
        }
        resident.tail.advance();
        member.completed = Some(block);
        Ok(())
    }

    fn gather_guarded(&mut self, layer: LayerId, members: &mut [TransferMember]) -> Result<(), StageError> {
        guarded(Stage::Transfer, || self.gather(layer, members))?
            .map_err(|error| StageError::Transfer(format!("{error:#}")))
    }

    fn gather(&mut self, layer: LayerId, members: &mut [TransferMember]) -> anyhow::Result<()> {
        let mut keys = Vec::new();
        for member in members.iter_mut().filter(|m| m.error.is_none()) {
            // In slot order, as the slots are walked below.
            member.selected.admissions.sort_unstable_by_key(|&(head, admission)| (head, admission.slot));
            keys.extend((member.selected.admissions.iter()).map(|&(head, admission)| EntryKey {
                request: member.request,
                layer,
                block: admission.block,
                head,
            }));
        }
        if keys.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        let fetched = self.runtime.block_on(self.store.fetch(&keys))?;
        let mut sources = fetched.entries.iter();
        let mut copies = Vec::with_capacity(keys.len());
        for member in members.iter_mut().filter(|m| m.error.is_none()) {
            let mut wanted = member.selected.admissions.iter().peekable();
            for (head, slot, memory) in member.cache.resident.slots_mut() {
                if wanted.next_if(|&&(h, admission)| h == head && admission.slot == slot).is_some() {
                    let source = sources.next().expect("a store returns one entry a key").bytes();
                    copies.push(EntryCopy { source, target: EntryTarget::Host(bytemuck::cast_slice_mut(memory)) });
                }
            }
        }
        self.runtime.block_on(self.transport.gather(&mut copies))?;
        self.link.carried(keys.len(), start.elapsed());
        Ok(())
    }
}
