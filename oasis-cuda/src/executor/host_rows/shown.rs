//! What an observer is shown of a layer.

use super::{BlockKeys, HostRows, KeysOf, Member};
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId};
use oasis_core::observer::{LayerKeys, LayerView, SelectionMember, StepObserver};
use oasis_core::pipeline::Selected;
use std::borrow::Cow;

impl HostRows {
    /// Shows the observer a layer of every member; `queries` are `[members][queries][q_heads][head_dim]`.
    pub fn show(&self, layer: LayerId, queries: &[f32], keys: &dyn BlockKeys, observer: &mut dyn StepObserver) {
        let members = self.members.iter().zip(queries.chunks_exact(self.member_queries()));
        for (index, (member, queries)) in members.enumerate() {
            let Some(row) = self.row(member.row) else { continue };
            let of = KeysOf { layer, index, member: *member, row };
            observer.layer(&LayerView {
                layer,
                step: self.step,
                request: row.request,
                position: member.position,
                queries,
                has_draft: self.queries == 2,
                summaries: &row.summaries[layer.index()],
                set: &row.sets[layer.index()],
                resident: None,
                keys: &FullKeys { geometry: &self.geometry, of, source: keys },
            });
        }
    }

    /// What has become of every member.
    pub fn selection_members(&self, layer: LayerId, selected: &[Selected]) -> Vec<SelectionMember> {
        let member = |(member, selected): (&Member, &Selected)| {
            let row = self.row(member.row)?;
            let mut selected = selected.clone();
            // As on the CPU: what the tail itself gives to a slot is not counted.
            if let Some(completed) = member.completed {
                selected.take_completed(completed);
            }
            Some(SelectionMember {
                request: row.request,
                blocks: row.summaries[layer.index()].blocks(),
                filled: selected.filled(),
                admitted: selected.admitted(),
                deferred: selected.deferred,
                completed: member.completed,
                failed: false,
            })
        };
        self.members.iter().zip(selected).filter_map(member).collect()
    }
}

/// The full KV of a member, as an observer sees it.
struct FullKeys<'a> {
    geometry: &'a KvGeometry,
    of: KeysOf<'a>,
    source: &'a dyn BlockKeys,
}

impl LayerKeys for FullKeys<'_> {
    fn of_head(&self, head: KvHead) -> Vec<Cow<'_, [f32]>> {
        let KvGeometry { block_tokens, head_dim, .. } = *self.geometry;
        let Member { position, before, .. } = self.of.member;
        let keys = |block: usize| {
            let mut keys = Vec::new();
            self.source.append(&self.of, head, BlockId::from(block), &mut keys);
            keys
        };
        let mut tail = keys(before);
        tail.truncate(position % block_tokens * head_dim);
        (0..before).map(keys).chain([tail]).map(Cow::Owned).collect()
    }
}
