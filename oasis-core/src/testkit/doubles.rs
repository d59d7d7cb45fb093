//! Small stand-ins for the five roles, for tests that need one under their control.

use crate::geometry::{HeadShape, KvGeometry};
use crate::ids::{BlockId, LayerId, RequestId};
use crate::memory::{
    BlockWrite, EntryCopy, EntryKey, EntryTarget, FetchedEntries, HostBytes, HostEntry, KvStore, Reservation,
    StoreError, StoreUsage, Transport,
};
use crate::policy::{
    Aggregate, PredictBatch, Predictor, QuerySource, ScoreTask, SelectBatch, Selector, SummarizeTask, Summarizer,
    rank_by_score,
};
use crate::working_set::{Ranking, TransferPlan};
use async_trait::async_trait;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Summarises a block by its first key; the score is the sum of the group's dot products with it.
pub struct FirstKey;

impl Summarizer for FirstKey {
    fn rows_per_block(&self) -> usize {
        1
    }

    fn summarize(&self, shape: HeadShape, tasks: &mut [SummarizeTask<'_>]) {
        for task in tasks {
            let blocks = task.keys.chunks_exact(shape.block_tokens * shape.head_dim);
            for (row, keys) in
                bytemuck::cast_slice_mut::<u32, f32>(task.rows).chunks_exact_mut(shape.head_dim).zip(blocks)
            {
                row.copy_from_slice(&keys[..shape.head_dim]);
            }
        }
    }

    fn score(&self, shape: HeadShape, _aggregate: Aggregate, tasks: &mut [ScoreTask<'_>]) {
        for task in tasks {
            let rows = bytemuck::cast_slice::<u32, f32>(task.summaries).chunks_exact(shape.head_dim);
            for (score, row) in task.scores.iter_mut().zip(rows) {
                let dot = |query: &[f32]| -> f32 { query.iter().zip(row).map(|(q, k)| q * k).sum() };
                *score = task.query.chunks_exact(shape.head_dim).map(dot).sum();
            }
        }
    }
}

/// Ranks blocks by their score with the draft query.
#[derive(Default)]
pub struct ByScore {
    scores: Vec<f32>,
}

impl Predictor for ByScore {
    fn query_source(&self) -> QuerySource {
        QuerySource::Draft
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        rank_by_score(batch, Aggregate::Sum, &mut self.scores, ranking);
    }
}

/// A predictor made of a function.
pub struct PredictWith<F>(pub F);

impl<F: FnMut(&PredictBatch<'_>, &mut Ranking) + Send> Predictor for PredictWith<F> {
    fn query_source(&self) -> QuerySource {
        QuerySource::Draft
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        (self.0)(batch, ranking);
    }
}

/// A selector made of a cap and a function.
pub struct SelectWith<F> {
    /// Most admissions a head and step.
    pub cap: usize,
    /// Plans.
    pub plan: F,
}

impl<F: FnMut(&SelectBatch<'_>, &mut TransferPlan) + Send> Selector for SelectWith<F> {
    fn cap(&self, _budget: usize) -> usize {
        self.cap
    }

    fn plan(&mut self, batch: &SelectBatch<'_>, plan: &mut TransferPlan) {
        (self.plan)(batch, plan);
    }
}

/// Capped LRU admission by the oracle [`capped_lru`](super::selector::capped_lru).
pub fn lru_selector(cap: usize) -> Box<dyn Selector> {
    let plan = move |batch: &SelectBatch<'_>, plan: &mut TransferPlan| {
        for (index, request) in batch.requests.iter().enumerate() {
            for head in (0..plan.kv_heads()).map(crate::ids::KvHead::from) {
                for admission in super::selector::capped_lru(batch.want.head(index, head), request.have.head(head), cap)
                {
                    plan.push(index, head, admission);
                }
            }
        }
    };
    Box::new(SelectWith { cap, plan })
}

/// Copies within host memory, after a function has been told the number of entries: it may sleep, count or fail.
pub struct CopyWith<F>(pub F);

#[async_trait]
impl<F: FnMut(usize) -> anyhow::Result<()> + Send> Transport for CopyWith<F> {
    async fn gather(&mut self, copies: &mut [EntryCopy<'_>]) -> anyhow::Result<()> {
        (self.0)(copies.len())?;
        for copy in copies {
            match &mut copy.target {
                EntryTarget::Host(target) => target.copy_from_slice(copy.source),
                EntryTarget::Device { .. } => anyhow::bail!("this double reaches host memory only"),
            }
        }
        Ok(())
    }
}

/// Copies within host memory.
pub fn copy_transport() -> Box<dyn Transport> {
    Box::new(CopyWith(|_| Ok(())))
}

/// A store without limits, in a map.
#[derive(Default)]
pub struct MapStore {
    state: Mutex<MapState>,
}

#[derive(Default)]
struct MapState {
    requests: HashMap<RequestId, KvGeometry>,
    blocks: HashMap<(RequestId, LayerId, BlockId), Arc<Block>>,
}

struct Block(Vec<u8>);

impl HostBytes for Block {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl MapStore {
    fn lock(&self) -> MutexGuard<'_, MapState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl KvStore for MapStore {
    fn usage(&self) -> StoreUsage {
        let state = self.lock();
        let used = state.blocks.values().map(|block| block.0.len() as u64).sum();
        StoreUsage { capacity: u64::MAX, reserved: used, used, requests: state.requests.len() }
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, _blocks: usize) -> Reservation {
        self.lock().requests.insert(request, *geometry);
        Reservation::Granted
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        let mut state = self.lock();
        for &BlockWrite { block, bytes } in blocks {
            let length = state.requests.get(&request).map(KvGeometry::block_bytes);
            if length != Some(bytes.len()) || state.blocks.contains_key(&(request, layer, block)) {
                let problem = format!("expected {length:?} bytes of a new block, found {}", bytes.len());
                return Err(StoreError::Refused { request, layer, block, problem });
            }
            state.blocks.insert((request, layer, block), Arc::new(Block(bytes.to_vec())));
        }
        Ok(())
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        let state = self.lock();
        let entry = |&key: &EntryKey| {
            let geometry = state.requests.get(&key.request).ok_or(StoreError::Missing(key))?;
            let memory = state.blocks.get(&(key.request, key.layer, key.block)).ok_or(StoreError::Missing(key))?;
            let (head, size) = (key.head.index(), geometry.entry_bytes());
            Ok(HostEntry { memory: memory.clone(), range: head * size..(head + 1) * size })
        };
        Ok(FetchedEntries { entries: keys.iter().map(entry).collect::<Result<_, StoreError>>()? })
    }

    fn release(&self, request: RequestId) {
        let mut state = self.lock();
        state.requests.remove(&request);
        state.blocks.retain(|(r, ..), _| *r != request);
    }
}
