//! A prompt's keys and values in one layer, and how they are cut into device memory and store blocks.

use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, SlotId};
use oasis_core::memory::{LayerCache, Resident, Summaries};
use oasis_core::pipeline::{Offload, OffloadBlocks, Pipeline};
use oasis_core::policy::Summarizer;
use oasis_core::working_set::WorkingSet;

/// Keys and values of a whole prompt in one layer, `[kv_heads][tokens][head_dim]`.
pub(super) struct LayerKv {
    pub tokens: usize,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

/// Where a layer's KV goes.
pub(super) struct CutContext<'a> {
    pub geometry: KvGeometry,
    /// What takes the blocks and what summarises them; `None` in a dense layer: nothing leaves the device.
    pub offload: Option<(&'a Pipeline, &'a dyn Summarizer)>,
    /// Slots of a KV head.
    pub slots: usize,
    /// Complete blocks that the whole context may come to.
    pub max_blocks: usize,
}

impl LayerKv {
    /// Cuts a layer's KV into blocks: summaries and tail stay, complete blocks go to the store, and to slots where there
    /// is one for each.
    pub fn cut(&self, context: &CutContext<'_>, request: RequestId, layer: LayerId) -> (LayerCache, Option<Offload>) {
        let (geometry, tokens) = (context.geometry, self.tokens);
        let KvGeometry { block_tokens, head_dim, .. } = geometry;
        let blocks = geometry.full_blocks(tokens);
        let mut resident = Resident::new(geometry, context.slots, BlockId::from(blocks));
        for token in blocks * block_tokens..tokens {
            let row = |cache: &[f32]| -> Vec<f32> {
                let heads = cache.chunks_exact(tokens * head_dim);
                heads.flat_map(|head| &head[token * head_dim..(token + 1) * head_dim]).copied().collect()
            };
            resident.tail.push(&row(&self.keys), &row(&self.values));
        }
        resident.set = WorkingSet::of_prompt(geometry.kv_heads, context.slots, blocks);
        if !resident.set.is_empty() {
            for block in 0..blocks {
                self.fill_slot(&mut resident, block);
            }
        }
        let Some((pipeline, summarizer)) = context.offload else {
            return (LayerCache { summaries: Summaries::none(), resident }, None);
        };

        let mut summaries = Summaries::new(&geometry, summarizer, context.max_blocks);
        let block_elements = blocks * block_tokens * head_dim;
        let keys = self.keys.chunks_exact(tokens * head_dim).map(|keys| &keys[..block_elements]);
        summaries.append(&geometry, summarizer, keys);
        let offload = (blocks > 0).then(|| {
            let entries = (0..blocks).flat_map(|block| self.block(&geometry, block)).collect();
            pipeline.offload(OffloadBlocks { request, layer, first: BlockId(0), entries })
        });
        (LayerCache { summaries, resident }, offload)
    }

    fn fill_slot(&self, resident: &mut Resident, block: usize) {
        let geometry = *resident.geometry();
        let entries = self.block(&geometry, block);
        for (head, entry) in entries.chunks_exact(geometry.entry_elements()).enumerate() {
            resident.slot_mut(KvHead::from(head), SlotId::from(block)).copy_from_slice(entry);
        }
    }

    /// Entries of one block, `[kv_heads][entry]`.
    fn block(&self, geometry: &KvGeometry, block: usize) -> Vec<f32> {
        let elements = geometry.block_tokens * geometry.head_dim;
        let range = block * elements..(block + 1) * elements;
        let head = self.tokens * geometry.head_dim;
        (self.keys.chunks_exact(head).zip(self.values.chunks_exact(head)))
            .flat_map(|(keys, values)| [&keys[range.clone()], &values[range.clone()]])
            .flatten()
            .copied()
            .collect()
    }
}
