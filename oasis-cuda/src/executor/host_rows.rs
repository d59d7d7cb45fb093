//! What the host knows of requests whose blocks it chooses, and what its policies decide, by the rules of every executor.

mod shown;

use super::options::Bridge;
use super::plan::Extent;
use crate::kernels::Address;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, SlotId, Step};
use oasis_core::memory::Summaries;
use oasis_core::observer::{SelectionView, StepObserver};
use oasis_core::pipeline::{RankMember, SelectMember, Selected, rank, select, summarize};
use oasis_core::policy::{Kept, LinkRate, Predictor, QuerySource, Selector, Summarizer};
use oasis_core::working_set::{Admission, Ranking, WorkingSet, top_k};
use std::collections::BTreeMap;
use std::ops::Range;

/// Built policies, for those of them that have no device code. The host runs them in every layer of a step, which waits
/// for it: right, and slow.
pub struct HostPolicies {
    /// Summarises blocks and scores queries.
    pub summarizer: Box<dyn Summarizer>,
    /// Ranks blocks.
    pub predictor: Box<dyn Predictor>,
    /// Plans admissions.
    pub selector: Box<dyn Selector>,
}

/// One row of the step under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Member {
    pub row: usize,
    /// Where its normal token stands.
    pub position: usize,
    /// Blocks that were complete before the step.
    pub before: usize,
    /// Complete blocks that are ranked.
    pub blocks: usize,
    /// Of them, the one that has just been completed and lies in the tail still.
    pub completed: Option<BlockId>,
}

impl Member {
    /// The row whose normal token stands at `position` and whose newest ranked token `lag` positions before it.
    fn new(row: usize, position: usize, lag: usize, block_tokens: usize) -> Self {
        let tokens = position + 1 - lag;
        let blocks = tokens / block_tokens;
        let completed = (blocks > 0 && tokens.is_multiple_of(block_tokens)).then(|| BlockId::from(blocks - 1));
        Self { row, position, before: position / block_tokens, blocks, completed }
    }
}

/// What the host knows of a request.
pub(super) struct Row {
    request: RequestId,
    /// `[layers]`
    sets: Vec<WorkingSet>,
    /// `[layers]`; none where the device summarises.
    pub summaries: Vec<Summaries>,
    /// The full KV of the first layer in host memory, `[blocks][kv_heads]` entries.
    pub host: Address,
    /// Bytes from a layer to the next.
    pub stride: usize,
}

/// What the device gave of a layer's members.
pub(super) enum Facts<'a> {
    /// f32 `[members][kv_heads][stride]`: scores of all blocks, of which the first are meant.
    Scores { scores: &'a [f32], stride: usize },
    /// f32 `[members][queries][q_heads][head_dim]`, and keys of every block.
    Queries { queries: &'a [f32], keys: &'a dyn BlockKeys },
}

/// Keys of the members' blocks.
pub(super) trait BlockKeys {
    /// Appends those of a block, `[block_tokens][head_dim]`. The block that is being filled is asked for by an observer
    /// only; behind its tokens is anything.
    fn append(&self, of: &KeysOf<'_>, head: KvHead, block: BlockId, keys: &mut Vec<f32>);
}

/// Whose keys are asked for.
pub(super) struct KeysOf<'a> {
    pub layer: LayerId,
    /// Of the member.
    pub index: usize,
    pub member: Member,
    pub row: &'a Row,
}

impl KeysOf<'_> {
    /// Keys of blocks, `[kv_heads][blocks][block_tokens][head_dim]`.
    fn blocks(&self, source: &dyn BlockKeys, kv_heads: usize, blocks: Range<usize>) -> Vec<f32> {
        let mut keys = Vec::new();
        for head in (0..kv_heads).map(KvHead::from) {
            blocks.clone().for_each(|block| source.append(self, head, BlockId::from(block), &mut keys));
        }
        keys
    }
}

/// Policies of the host, and the requests that they decide for.
pub(super) struct HostRows {
    pub policies: HostPolicies,
    pub bridge: Bridge,
    pub geometry: KvGeometry,
    budget: usize,
    cap: usize,
    capacity: usize,
    /// Rows of a request in a step; blocks are ranked by the last one's query.
    queries: usize,
    exact: bool,
    /// What is wanted whatever the device's scores.
    kept: Kept,
    step: Step,
    /// Whether the step is a request's first one, which sees the full KV.
    is_first: bool,
    /// Rows of the step under way, in order.
    pub members: Vec<Member>,
    rows: Vec<Option<Row>>,
    failures: BTreeMap<usize, String>,
    observer: Option<Box<dyn StepObserver>>,
}

impl HostRows {
    /// Starts with no request; `rows` is how many there can be.
    pub fn new(
        policies: HostPolicies,
        bridge: Bridge,
        (cap, kept): (usize, Kept),
        (geometry, extent, rows): (KvGeometry, Extent, usize),
    ) -> Self {
        Self {
            bridge,
            budget: extent.slots,
            cap,
            capacity: extent.blocks,
            queries: extent.queries,
            kept,
            exact: policies.predictor.query_source() == QuerySource::Exact,
            policies,
            geometry,
            step: Step(0),
            is_first: false,
            members: Vec::new(),
            rows: (0..rows).map(|_| None).collect(),
            failures: BTreeMap::new(),
            observer: None,
        }
    }

    /// Sets or removes the observer of decode steps.
    pub fn set_observer(&mut self, observer: Option<Box<dyn StepObserver>>) {
        self.observer = observer;
    }

    /// Whether there is an observer.
    pub fn is_observed(&self) -> bool {
        self.observer.is_some()
    }

    /// A request takes a row; its full KV is at `host`, `stride` bytes a layer.
    pub fn admit(&mut self, row: usize, request: RequestId, host: Address, stride: usize) {
        let layers = self.geometry.layers;
        let summaries = || Summaries::new(&self.geometry, &*self.policies.summarizer, self.capacity);
        self.rows[row] = Some(Row {
            request,
            sets: vec![WorkingSet::new(self.geometry.kv_heads, self.budget); layers],
            summaries: match self.bridge {
                Bridge::Selection => Vec::new(),
                Bridge::Prediction => (0..layers).map(|_| summaries()).collect(),
            },
            host,
            stride,
        });
    }

    /// A request leaves its row.
    pub fn release(&mut self, row: usize) {
        let left = self.rows[row].take();
        if let (Some(observer), Some(left)) = (&mut self.observer, left) {
            observer.release(left.request);
        }
    }

    /// What is known of a row's request.
    pub fn row(&self, row: usize) -> Option<&Row> {
        self.rows[row].as_ref()
    }

    /// Says which block each slot of a row holds, in all layers alike: `[kv_heads][slots]`, negative is free.
    pub fn occupy(&mut self, row: usize, table: &[i32]) {
        let Some(row) = &mut self.rows[row] else { return };
        for set in &mut row.sets {
            for (head, slots) in table.chunks_exact(self.budget).enumerate() {
                for (slot, block) in slots.iter().enumerate() {
                    if let Ok(block) = u32::try_from(*block) {
                        let admission = Admission { block: BlockId(block), slot: SlotId::from(slot) };
                        set.place(KvHead::from(head), admission, self.step);
                    }
                }
            }
        }
    }

    /// A step begins, of rows whose tokens stand at these positions; rows in order. `is_first` says that it is a request's
    /// first one.
    pub fn begin(&mut self, is_first: bool, positions: impl IntoIterator<Item = (usize, usize)>) {
        self.step = Step(self.step.0 + 1);
        self.is_first = is_first;
        let (lag, block_tokens) = (usize::from(self.exact), self.geometry.block_tokens);
        let member = |(row, position)| Member::new(row, position, lag, block_tokens);
        self.members = positions.into_iter().map(member).collect();
    }

    /// Rows for which a policy failed in the last step, and why.
    pub fn take_failures(&mut self) -> BTreeMap<usize, String> {
        std::mem::take(&mut self.failures)
    }

    /// The step under way.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Ranks and selects for one layer. `None` when a policy failed: the step goes on without the members.
    pub fn decide(&mut self, layer: LayerId, facts: &Facts<'_>, link: Option<LinkRate>) -> Option<Vec<Selected>> {
        let mut observer = self.observer.take();
        let decided = self.try_decide(layer, facts, link, observer.as_deref_mut());
        self.observer = observer;
        decided
            .map_err(|problem| {
                self.failures.extend(self.members.drain(..).map(|member| (member.row, problem.clone())));
            })
            .ok()
    }

    fn try_decide(
        &mut self,
        layer: LayerId,
        facts: &Facts<'_>,
        link: Option<LinkRate>,
        observer: Option<&mut (dyn StepObserver + 'static)>,
    ) -> Result<Vec<Selected>, String> {
        let (queries, keys) = match facts {
            Facts::Scores { scores, stride } => {
                let want = self.rank_scores(scores, *stride);
                return self.select(layer, &want, link);
            }
            Facts::Queries { queries, keys } => (*queries, *keys),
        };
        self.summarize(layer, keys)?;
        let Some(observer) = observer else {
            let want = self.rank(layer, queries, keys)?;
            return self.select(layer, &want, link);
        };
        // Where a step chooses before its attention, attention finds what has just been chosen.
        let chooses_first = self.exact && !self.is_first;
        if !chooses_first {
            self.show(layer, queries, keys, observer);
        }
        let want = self.rank(layer, queries, keys)?;
        let selected = self.select(layer, &want, link)?;
        let members = self.selection_members(layer, &selected);
        observer.selected(&SelectionView { layer, step: self.step, ranking: &want, link, members: &members });
        if chooses_first {
            self.show(layer, queries, keys, observer);
        }
        Ok(selected)
    }

    /// Summarises what was complete before the step.
    fn summarize(&mut self, layer: LayerId, keys: &dyn BlockKeys) -> Result<(), String> {
        let new = self.new_keys(layer, keys, |member| member.before);
        for (row, keys) in of_members(&mut self.rows, &self.members).zip(new) {
            let summaries = &mut row.summaries[layer.index()];
            summarize(&self.geometry, &*self.policies.summarizer, &keys, summaries)
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Keys of the members' blocks that are not summarised yet, up to a number of blocks of each.
    fn new_keys(&self, layer: LayerId, keys: &dyn BlockKeys, end: impl Fn(&Member) -> usize) -> Vec<Vec<f32>> {
        let new = |(index, member): (usize, &Member)| {
            let row = self.row(member.row)?;
            let blocks = row.summaries[layer.index()].blocks()..end(member);
            Some(KeysOf { layer, index, member: *member, row }.blocks(keys, self.geometry.kv_heads, blocks))
        };
        self.members.iter().enumerate().filter_map(new).collect()
    }

    fn rank_scores(&self, scores: &[f32], stride: usize) -> Ranking {
        let kv_heads = self.geometry.kv_heads;
        let mut want = Ranking::new(self.members.len(), kv_heads);
        for (index, member) in self.members.iter().enumerate() {
            for head in 0..kv_heads {
                let mut scores = scores[(index * kv_heads + head) * stride..][..member.blocks].to_vec();
                self.kept.raise(self.budget, &mut scores);
                want.set(index, KvHead::from(head), top_k(&scores, self.budget));
            }
        }
        want
    }

    /// Elements of one query.
    fn width(&self) -> usize {
        self.geometry.q_heads * self.geometry.head_dim
    }

    /// Elements of all queries of a member.
    pub fn member_queries(&self) -> usize {
        self.queries * self.width()
    }

    /// Summarises what the step has completed and ranks.
    fn rank(&mut self, layer: LayerId, queries: &[f32], keys: &dyn BlockKeys) -> Result<Ranking, String> {
        let completed = self.new_keys(layer, keys, |member| member.blocks);
        let width = self.width();
        let rows = of_members(&mut self.rows, &self.members);
        let mut members: Vec<RankMember<'_>> = (rows.zip(queries.chunks_exact(self.queries * width)).zip(&completed))
            .map(|((row, queries), keys)| RankMember {
                query: &queries[(self.queries - 1) * width..],
                completed_keys: Some(keys.as_slice()).filter(|keys| !keys.is_empty()),
                summaries: &mut row.summaries[layer.index()],
            })
            .collect();
        let HostPolicies { summarizer, predictor, .. } = &mut self.policies;
        let want = rank(&self.geometry, self.budget, layer, &**summarizer, &mut **predictor, &mut members)
            .map_err(|error| error.to_string())?;
        for (index, member) in self.members.iter().enumerate() {
            for head in (0..self.geometry.kv_heads).map(KvHead::from) {
                let (expected, found) = (member.blocks.min(self.budget), want.head(index, head).len());
                // Attention reads every slot.
                if found != expected {
                    return Err(format!(
                        "the predictor's ranking, KV head {head}: expected {expected} blocks, found {found}\n  hint: a GPU \
                         keeps working sets full; device.kind = \"cpu\" need not"
                    ));
                }
            }
        }
        Ok(want)
    }

    fn select(&mut self, layer: LayerId, want: &Ranking, link: Option<LinkRate>) -> Result<Vec<Selected>, String> {
        let rows = of_members(&mut self.rows, &self.members);
        let mut members: Vec<SelectMember<'_>> = (rows.zip(&self.members))
            .map(|(row, member)| SelectMember { set: &mut row.sets[layer.index()], completed: member.completed })
            .collect();
        select(&mut *self.policies.selector, self.cap, layer, self.step, want, link, &mut members)
            .map_err(|error| error.to_string())
    }
}

/// State of the members' rows, in their order.
fn of_members<'a>(rows: &'a mut [Option<Row>], members: &'a [Member]) -> impl Iterator<Item = &'a mut Row> {
    let is_member = |row: usize| members.iter().any(|member| member.row == row);
    rows.iter_mut().enumerate().filter(move |(row, _)| is_member(*row)).filter_map(|(_, state)| state.as_mut())
}

#[cfg(test)]
mod parity;
#[cfg(test)]
mod tests;
