//! Policies that the host runs for the device: their state and what they decide, by the rules of every executor.

use super::link::LinkTimer;
use super::options::{Bridge, SparseOptions};
use super::plan::Extent;
use crate::device::{Device, DeviceError, PinnedBuffer};
use crate::kernels::{Address, CopyList, EntryCopy};
use crate::layout::{entry_bytes, key_offset};
use half::bf16;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId, SlotId, Step};
use oasis_core::memory::Summaries;
use oasis_core::pipeline::{RankMember, SelectMember, Selected, rank, select};
use oasis_core::policy::{Kept, LinkRate, Predictor, QuerySource, Selector, Summarizer};
use oasis_core::working_set::{Admission, Ranking, WorkingSet, top_k};
use std::collections::BTreeMap;

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
    /// Complete blocks that are ranked.
    pub blocks: usize,
    /// Of them, the one that has just been completed and lies in the tail still.
    pub completed: Option<BlockId>,
}

impl Member {
    /// The row whose newest ranked token stands at position `ranked`; -1 where there is none.
    fn new(row: usize, ranked: i32, block_tokens: usize) -> Self {
        let tokens = (ranked + 1) as usize;
        let blocks = tokens / block_tokens;
        let completed = (blocks > 0 && tokens.is_multiple_of(block_tokens)).then(|| BlockId::from(blocks - 1));
        Self { row, blocks, completed }
    }
}

/// What the host knows of a request.
pub(super) struct Row {
    /// `[layers]`
    sets: Vec<WorkingSet>,
    /// `[layers]`; none where the device summarises.
    pub summaries: Vec<Summaries>,
    /// The full KV of the first layer in host memory, `[blocks][kv_heads]` entries.
    pub host: Address,
    /// Bytes from a layer to the next.
    pub stride: usize,
}

/// Policies of the host with their state.
pub(super) struct HostSide {
    pub policies: HostPolicies,
    pub bridge: Bridge,
    pub geometry: KvGeometry,
    budget: usize,
    cap: usize,
    capacity: usize,
    exact: bool,
    /// What is wanted whatever the device's scores.
    kept: Kept,
    step: Step,
    /// Rows of the step under way, in order.
    pub members: Vec<Member>,
    pub rows: Vec<Option<Row>>,
    failures: BTreeMap<usize, String>,
    /// f32 scores `[members][kv_heads][stride]`, or bf16 queries `[members][q_heads][head_dim]`.
    pub facts: PinnedBuffer,
    /// `[members][kv_heads][2]` entries: tails in which a block was completed.
    pub tails: PinnedBuffer,
    /// A list of copies of each layer, on its way to the device.
    pub lists: Vec<PinnedBuffer>,
    totals: Vec<CopyList>,
    pub link: LinkTimer,
}

impl HostSide {
    /// Starts with no request; `rows` is how many there can be.
    pub fn new(
        device: &Device,
        policies: HostPolicies,
        options: &SparseOptions,
        bridge: Bridge,
        (geometry, extent, rows): (KvGeometry, Extent, usize),
    ) -> Result<Self, DeviceError> {
        let (heads, entry) = (rows * geometry.kv_heads, entry_bytes(geometry.head_dim));
        let pinned = |bytes| device.pinned(bytes, &|_| ());
        let (facts, tails) = match bridge {
            Bridge::Selection => (heads * extent.tiles * geometry.block_tokens * 4, 0),
            Bridge::Prediction => (rows * geometry.q_heads * geometry.head_dim * 2, heads * 2 * entry),
        };
        let list = size_of::<CopyList>() + heads * (extent.slots + 2) * size_of::<EntryCopy>();
        Ok(Self {
            bridge,
            budget: extent.slots,
            cap: options.cap,
            capacity: extent.blocks,
            kept: options.ranking.map(|ranking| ranking.kept).unwrap_or_default(),
            exact: policies.predictor.query_source() == QuerySource::Exact,
            policies,
            geometry,
            step: Step(0),
            members: Vec::new(),
            rows: (0..rows).map(|_| None).collect(),
            failures: BTreeMap::new(),
            facts: pinned(facts)?,
            tails: pinned(tails)?,
            lists: (0..geometry.layers).map(|_| pinned(list)).collect::<Result<_, _>>()?,
            totals: vec![CopyList::default(); geometry.layers],
            link: LinkTimer::new(device, geometry.layers)?,
        })
    }

    /// A request takes a row; its full KV is at `host`, `stride` bytes a layer.
    pub fn admit(&mut self, row: usize, host: Address, stride: usize) {
        let layers = self.geometry.layers;
        let summaries = || Summaries::new(&self.geometry, &*self.policies.summarizer, self.capacity);
        self.rows[row] = Some(Row {
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
        self.rows[row] = None;
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

    /// A step begins, of rows whose tokens stand at these positions; rows in order.
    pub fn begin(&mut self, positions: impl IntoIterator<Item = (usize, i32)>) {
        self.step = Step(self.step.0 + 1);
        let (lag, block_tokens) = (i32::from(self.exact), self.geometry.block_tokens);
        let member = |(row, position)| Member::new(row, position - lag, block_tokens);
        self.members = positions.into_iter().map(member).collect();
    }

    /// Rows for which a policy failed in the last step, and why.
    pub fn take_failures(&mut self) -> BTreeMap<usize, String> {
        std::mem::take(&mut self.failures)
    }

    /// A layer is about to be selected: gives how fast the link has been.
    pub fn selecting(&mut self, layer: LayerId) -> Result<Option<LinkRate>, DeviceError> {
        self.link.selecting(layer, self.step)
    }

    /// Ranks and selects for one layer; `facts`, and `keys` of blocks to be summarised, `[members][kv_heads][blocks]
    /// [block_tokens][head_dim]`, are those of the members. `None` when a policy failed: the step goes on without them.
    pub fn decide(&mut self, layer: LayerId, keys: &[Vec<f32>], link: Option<LinkRate>) -> Option<Vec<Selected>> {
        let decided = self.rank(layer, keys).and_then(|want| self.select(layer, &want, link));
        decided
            .map_err(|problem| {
                self.failures.extend(self.members.drain(..).map(|member| (member.row, problem.clone())));
            })
            .ok()
    }

    fn rank(&mut self, layer: LayerId, keys: &[Vec<f32>]) -> Result<Ranking, String> {
        let kv_heads = self.geometry.kv_heads;
        if self.bridge == Bridge::Selection {
            let mut want = Ranking::new(self.members.len(), kv_heads);
            let scores: &[f32] = bytemuck::cast_slice(self.facts.as_slice());
            let stride = scores.len() / (self.rows.len() * kv_heads);
            for (index, member) in self.members.iter().enumerate() {
                for head in 0..kv_heads {
                    let mut scores = scores[(index * kv_heads + head) * stride..][..member.blocks].to_vec();
                    self.kept.raise(self.budget, &mut scores);
                    want.set(index, KvHead::from(head), top_k(&scores, self.budget));
                }
            }
            return Ok(want);
        }
        let width = self.geometry.q_heads * self.geometry.head_dim;
        let bits: &[u16] = bytemuck::cast_slice(self.facts.as_slice());
        let queries: Vec<f32> =
            bits[..self.members.len() * width].iter().map(|bits| bf16::from_bits(*bits).to_f32()).collect();
        let rows = of_members(&mut self.rows, &self.members);
        let mut members: Vec<RankMember<'_>> = (rows.zip(queries.chunks_exact(width)).zip(keys))
            .map(|((row, query), keys)| RankMember {
                query,
                completed_keys: Some(keys.as_slice()).filter(|keys| !keys.is_empty()),
                summaries: &mut row.summaries[layer.index()],
            })
            .collect();
        let HostPolicies { summarizer, predictor, .. } = &mut self.policies;
        let want = rank(&self.geometry, self.budget, layer, &**summarizer, &mut **predictor, &mut members)
            .map_err(|error| error.to_string())?;
        for (index, member) in self.members.iter().enumerate() {
            for head in (0..kv_heads).map(KvHead::from) {
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

    /// Writes a layer's list of copies, with the sums since the start.
    pub fn write_list(&mut self, layer: usize, selected: &[Selected], copies: &[EntryCopy]) {
        self.link.planned(LayerId::from(layer), selected.iter().map(|selected| selected.admissions.len()).sum());
        let total = &mut self.totals[layer];
        for selected in selected {
            let admissions = selected.admissions.len() as u64;
            *if selected.is_fill { &mut total.filled } else { &mut total.admitted } += admissions;
            total.deferred += selected.deferred as u64;
        }
        total.count = copies.len() as u32;
        let (header, list) = self.lists[layer].as_mut_slice().split_at_mut(size_of::<CopyList>());
        header.copy_from_slice(bytemuck::bytes_of(total));
        list[..size_of_val(copies)].copy_from_slice(bytemuck::cast_slice(copies));
    }
}

/// State of the members' rows, in their order.
fn of_members<'a>(rows: &'a mut [Option<Row>], members: &'a [Member]) -> impl Iterator<Item = &'a mut Row> {
    let is_member = |row: usize| members.iter().any(|member| member.row == row);
    rows.iter_mut().enumerate().filter(move |(row, _)| is_member(*row)).filter_map(|(_, state)| state.as_mut())
}

/// Keys of an entry, appended to `keys` as `[block_tokens][head_dim]`.
pub(super) fn read_keys(entry: &[u8], geometry: &KvGeometry, keys: &mut Vec<f32>) {
    for token in 0..geometry.block_tokens {
        keys.extend((0..geometry.head_dim).map(|d| {
            let at = key_offset(geometry.head_dim, token, d);
            bf16::from_le_bytes([entry[at], entry[at + 1]]).to_f32()
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{BLOCK_TOKENS, value_offset};
    use oasis_core::geometry::KvDtype;

    #[test]
    fn a_block_is_ranked_from_its_last_token_on_and_completed_by_it() {
        let member = |ranked| {
            let Member { blocks, completed, .. } = Member::new(3, ranked, 16);
            (blocks, completed)
        };
        assert_eq!(member(-1), (0, None));
        assert_eq!(member(14), (0, None));
        assert_eq!(member(15), (1, Some(BlockId(0))));
        assert_eq!(member(16), (1, None));
        assert_eq!(member(31), (2, Some(BlockId(1))));
    }

    #[test]
    fn keys_are_read_in_order_and_values_are_not() {
        for head_dim in [64, 128] {
            let mut entry = vec![0; entry_bytes(head_dim)];
            let number = |token: usize, d: usize| bf16::from_f32((token * 8 + d % 8) as f32 + (d / 8) as f32 / 16.0);
            for token in 0..BLOCK_TOKENS {
                for d in 0..head_dim {
                    entry[key_offset(head_dim, token, d)..][..2].copy_from_slice(&number(token, d).to_le_bytes());
                    entry[value_offset(head_dim, token, d)..][..2].copy_from_slice(&bf16::NAN.to_le_bytes());
                }
            }
            let geometry = KvGeometry {
                layers: 1,
                q_heads: 1,
                kv_heads: 1,
                head_dim,
                block_tokens: BLOCK_TOKENS,
                dtype: KvDtype::Bf16,
            };
            let mut keys = vec![7.0];
            read_keys(&entry, &geometry, &mut keys);
            let expected = (0..BLOCK_TOKENS).flat_map(|t| (0..head_dim).map(move |d| number(t, d).to_f32()));
            assert_eq!(keys, [7.0].into_iter().chain(expected).collect::<Vec<_>>());
        }
    }
}
