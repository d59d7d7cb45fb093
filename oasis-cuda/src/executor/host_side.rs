//! Policies that the host runs for the device: the pinned memory through which facts come and decisions go.

use super::host::HostPool;
use super::host_rows::{BlockKeys, Facts, HostPolicies, HostRows, KeysOf};
use super::link::LinkTimer;
use super::options::{Bridge, SparseOptions};
use super::plan::Extent;
use crate::device::{Device, DeviceError, PinnedBuffer};
use crate::kernels::{CopyList, EntryCopy};
use crate::layout::{entry_bytes, key_offset};
use half::bf16;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId};
use oasis_core::pipeline::Selected;
use oasis_core::policy::LinkRate;

/// Policies of the host with their state, and what lies between them and the device.
pub(super) struct HostSide {
    pub rows: HostRows,
    /// f32 scores `[members][kv_heads][stride]`, or bf16 queries `[members][queries][q_heads][head_dim]`.
    facts: PinnedBuffer,
    /// `[members][kv_heads][2]` entries: tails in which a block was completed, or all where steps are observed.
    tails: PinnedBuffer,
    /// A list of copies of each layer, on its way to the device.
    pub lists: Vec<PinnedBuffer>,
    totals: Vec<CopyList>,
    pub link: LinkTimer,
    /// Scores of a KV head.
    stride: usize,
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
        let stride = extent.tiles * geometry.block_tokens;
        let (facts, tails) = match bridge {
            Bridge::Selection => (heads * stride * 4, 0),
            Bridge::Prediction => (rows * extent.queries * geometry.q_heads * geometry.head_dim * 2, heads * 2 * entry),
        };
        let list = size_of::<CopyList>() + heads * (extent.slots + 2) * size_of::<EntryCopy>();
        let kept = options.ranking.map(|ranking| ranking.kept).unwrap_or_default();
        Ok(Self {
            rows: HostRows::new(policies, bridge, (options.cap, kept), (geometry, extent, rows)),
            facts: pinned(facts)?,
            tails: pinned(tails)?,
            lists: (0..geometry.layers).map(|_| pinned(list)).collect::<Result<_, _>>()?,
            totals: vec![CopyList::default(); geometry.layers],
            link: LinkTimer::new(device, geometry.layers)?,
            stride,
        })
    }

    /// Where the facts of the members come to, one after the other.
    pub fn facts(&self) -> &PinnedBuffer {
        &self.facts
    }

    /// Where tails of the members come to, one after the other.
    pub fn tails(&self) -> &PinnedBuffer {
        &self.tails
    }

    /// A layer is about to be selected: gives how fast the link has been.
    pub fn selecting(&mut self, layer: LayerId) -> Result<Option<LinkRate>, DeviceError> {
        self.link.selecting(layer, self.rows.step())
    }

    /// Ranks and selects for one layer by the facts that have come, and by the full KV in `host`. `None` when a policy
    /// failed: the step goes on without the members.
    pub fn decide(&mut self, layer: LayerId, host: Option<&HostPool>, link: Option<LinkRate>) -> Option<Vec<Selected>> {
        match self.rows.bridge {
            Bridge::Selection => {
                let scores = bytemuck::cast_slice(self.facts.as_slice());
                self.rows.decide(layer, &Facts::Scores { scores, stride: self.stride }, link)
            }
            Bridge::Prediction => {
                let bits: &[u16] = bytemuck::cast_slice(self.facts.as_slice());
                let queries = &bits[..self.rows.members.len() * self.rows.member_queries()];
                let queries: Vec<f32> = queries.iter().map(|bits| bf16::from_bits(*bits).to_f32()).collect();
                let keys = HostKeys { geometry: self.rows.geometry, host, tails: self.tails.as_slice() };
                self.rows.decide(layer, &Facts::Queries { queries: &queries, keys: &keys }, link)
            }
        }
    }

    /// Writes a layer's list of copies, with the sums since the start.
    pub fn write_list(&mut self, layer: usize, selected: &[Selected], copies: &[EntryCopy]) {
        // A first working set comes from the full KV on the device.
        let crosses = selected.iter().filter(|selected| !selected.is_fill);
        self.link.planned(LayerId::from(layer), crosses.map(|selected| selected.admissions.len()).sum());
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

/// Keys in host memory, and of blocks that are in the tail still.
struct HostKeys<'a> {
    geometry: KvGeometry,
    host: Option<&'a HostPool>,
    /// `[members][kv_heads][2]` entries.
    tails: &'a [u8],
}

impl BlockKeys for HostKeys<'_> {
    fn append(&self, of: &KeysOf<'_>, head: KvHead, block: BlockId, keys: &mut Vec<f32>) {
        let KvGeometry { kv_heads, head_dim, .. } = self.geometry;
        let (entry, block_index) = (entry_bytes(head_dim), block.index());
        let is_in_tail = of.member.completed == Some(block) || of.member.before == block_index;
        let bytes = match self.host {
            _ if is_in_tail => {
                &self.tails[((of.index * kv_heads + head.index()) * 2 + block_index % 2) * entry..][..entry]
            }
            Some(host) => {
                let base = of.row.host.offset(of.layer.index() * of.row.stride);
                host.bytes_at(base.offset((block_index * kv_heads + head.index()) * entry), entry)
            }
            None => return,
        };
        read_keys(bytes, &self.geometry, keys);
    }
}

/// Keys of an entry, appended to `keys` as `[block_tokens][head_dim]`.
fn read_keys(entry: &[u8], geometry: &KvGeometry, keys: &mut Vec<f32>) {
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
