//! Device memory of one (request, layer) for executors whose device is host memory, in 32-bit floats.

use crate::geometry::KvGeometry;
use crate::ids::{BlockId, KvHead, SlotId};
use crate::policy::{SummarizeTask, Summarizer};
use crate::working_set::WorkingSet;

/// Summaries of all complete blocks of one (request, layer).
#[derive(Debug, Clone)]
pub struct Summaries {
    capacity: usize,
    blocks: usize,
    /// Words of one block's summary.
    width: usize,
    /// `[kv_heads][capacity][rows_per_block][row_words]`
    rows: Vec<u32>,
}

impl Summaries {
    /// Room for the summaries of `capacity` blocks by `summarizer`.
    pub fn new(geometry: &KvGeometry, summarizer: &dyn Summarizer, capacity: usize) -> Self {
        let width = Self::block_words(geometry, summarizer);
        Self { capacity, blocks: 0, width, rows: vec![0; geometry.kv_heads * capacity * width] }
    }

    /// No summaries and no room for any: of a layer that keeps every block.
    pub fn none() -> Self {
        Self { capacity: 0, blocks: 0, width: 0, rows: Vec::new() }
    }

    /// 32-bit words of one block's summary in one KV head.
    pub fn block_words(geometry: &KvGeometry, summarizer: &dyn Summarizer) -> usize {
        summarizer.rows_per_block() * summarizer.row_words(geometry.head_shape())
    }

    /// Blocks summarised so far.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        size_of_val(self.rows.as_slice()) as u64
    }

    /// Summaries of the first `blocks` blocks of one KV head, `[blocks][rows_per_block][row_words]`.
    pub fn head(&self, head: KvHead, blocks: usize) -> &[u32] {
        let start = head.index() * self.capacity * self.width;
        &self.rows[start..start + blocks * self.width]
    }

    /// All summaries, `[kv_heads][blocks][rows_per_block][row_words]`.
    pub fn words(&self, kv_heads: usize) -> Vec<u32> {
        (0..kv_heads).flat_map(|head| self.head(KvHead::from(head), self.blocks)).copied().collect()
    }

    /// Takes over the summaries of the first `blocks` blocks, as [`words`](Self::words) gave them.
    ///
    /// # Panics
    /// When the blocks do not fit the capacity, or `words` has another length.
    pub fn restore(&mut self, blocks: usize, words: &[u32]) {
        let head = self.capacity * self.width;
        assert_eq!(words.len() * head, self.rows.len() * blocks * self.width, "summaries of {blocks} blocks");
        if words.is_empty() {
            return;
        }
        for (rows, words) in self.rows.chunks_exact_mut(head).zip(words.chunks_exact(blocks * self.width)) {
            rows[..words.len()].copy_from_slice(words);
        }
        self.blocks = blocks;
    }

    /// Summarises complete blocks and appends them.
    ///
    /// `keys` has one slice a KV head, `[blocks][block_tokens][head_dim]`.
    ///
    /// # Panics
    /// When the blocks do not fit the capacity.
    pub fn append<'a>(
        &mut self,
        geometry: &KvGeometry,
        summarizer: &dyn Summarizer,
        keys: impl IntoIterator<Item = &'a [f32]>,
    ) {
        let (width, first) = (self.width, self.blocks);
        let mut tasks: Vec<SummarizeTask<'_>> = (self.rows.chunks_exact_mut((self.capacity * width).max(1)).zip(keys))
            .map(|(rows, keys)| {
                let blocks = keys.len() / (geometry.block_tokens * geometry.head_dim);
                self.blocks = first + blocks;
                SummarizeTask { keys, rows: &mut rows[first * width..(first + blocks) * width] }
            })
            .collect();
        summarizer.summarize(geometry.head_shape(), &mut tasks);
    }
}

/// The block being filled: entries of all KV heads, of which the first tokens are valid.
#[derive(Debug, Clone)]
pub struct Tail {
    geometry: KvGeometry,
    block: BlockId,
    tokens: usize,
    /// `[kv_heads][entry]`
    data: Vec<f32>,
}

impl Tail {
    /// An empty tail that will become block `block`.
    pub fn new(geometry: KvGeometry, block: BlockId) -> Self {
        Self { geometry, block, tokens: 0, data: vec![0.0; geometry.kv_heads * geometry.entry_elements()] }
    }

    /// Block that is being filled.
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// Valid tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether every token is valid.
    pub fn is_full(&self) -> bool {
        self.tokens == self.geometry.block_tokens
    }

    /// Appends one token: keys (after RoPE) and values, `[kv_heads][head_dim]` each.
    ///
    /// # Panics
    /// When the tail is full.
    pub fn push(&mut self, keys: &[f32], values: &[f32]) {
        assert!(!self.is_full(), "a full tail block takes no token");
        let KvGeometry { head_dim, block_tokens, .. } = self.geometry;
        let entries = self.data.chunks_exact_mut(self.geometry.entry_elements());
        for ((entry, key), value) in entries.zip(keys.chunks_exact(head_dim)).zip(values.chunks_exact(head_dim)) {
            entry[self.tokens * head_dim..][..head_dim].copy_from_slice(key);
            entry[(block_tokens + self.tokens) * head_dim..][..head_dim].copy_from_slice(value);
        }
        self.tokens += 1;
    }

    /// Valid keys of one head, `[tokens][head_dim]`.
    pub fn keys(&self, head: KvHead) -> &[f32] {
        &self.entry(head)[..self.tokens * self.geometry.head_dim]
    }

    /// Valid values of one head, `[tokens][head_dim]`.
    pub fn values(&self, head: KvHead) -> &[f32] {
        let KvGeometry { head_dim, block_tokens, .. } = self.geometry;
        &self.entry(head)[block_tokens * head_dim..][..self.tokens * head_dim]
    }

    /// Entries of all heads, `[kv_heads][entry]`; complete only when the tail is full.
    pub fn entries(&self) -> &[f32] {
        &self.data
    }

    fn entry(&self, head: KvHead) -> &[f32] {
        let elements = self.geometry.entry_elements();
        &self.data[head.index() * elements..][..elements]
    }

    /// Starts the next block.
    pub fn advance(&mut self) {
        self.block = BlockId(self.block.0 + 1);
        self.tokens = 0;
    }
}

/// What attention reads: the slots with their working set, and the tail block.
#[derive(Debug, Clone)]
pub struct Resident {
    geometry: KvGeometry,
    /// Which block each slot holds.
    pub set: WorkingSet,
    /// Block being filled.
    pub tail: Tail,
    /// `[kv_heads][slots][entry]`
    slots: Vec<f32>,
}

impl Resident {
    /// `slots` free slots a KV head and an empty tail at block `tail`.
    pub fn new(geometry: KvGeometry, slots: usize, tail: BlockId) -> Self {
        Self {
            geometry,
            set: WorkingSet::new(geometry.kv_heads, slots),
            tail: Tail::new(geometry, tail),
            slots: vec![0.0; geometry.kv_heads * slots * geometry.entry_elements()],
        }
    }

    /// Shape of the cache.
    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Bytes of the slots and the tail block.
    pub fn bytes(&self) -> u64 {
        (size_of_val(self.slots.as_slice()) + size_of_val(self.tail.data.as_slice())) as u64
    }

    /// Entry in a slot: `K[block_tokens][head_dim]` then `V[block_tokens][head_dim]`.
    pub fn slot(&self, head: KvHead, slot: SlotId) -> &[f32] {
        let elements = self.geometry.entry_elements();
        &self.slots[(head.index() * self.set.slots() + slot.index()) * elements..][..elements]
    }

    /// Memory of a slot.
    pub fn slot_mut(&mut self, head: KvHead, slot: SlotId) -> &mut [f32] {
        let elements = self.geometry.entry_elements();
        &mut self.slots[(head.index() * self.set.slots() + slot.index()) * elements..][..elements]
    }

    /// Memory of every slot in turn, with its head and slot.
    pub fn slots_mut(&mut self) -> impl Iterator<Item = (KvHead, SlotId, &mut [f32])> {
        let per_head = self.set.slots();
        (self.slots.chunks_exact_mut(self.geometry.entry_elements()).enumerate())
            .map(move |(i, entry)| (KvHead::from(i / per_head), SlotId::from(i % per_head), entry))
    }

    /// Copies the completed tail block's entry of one head into a slot.
    pub fn copy_tail_to(&mut self, head: KvHead, slot: SlotId) {
        let elements = self.geometry.entry_elements();
        let target = (head.index() * self.set.slots() + slot.index()) * elements;
        self.slots[target..target + elements].copy_from_slice(&self.tail.data[head.index() * elements..][..elements]);
    }

    /// Occupied slots of one head in the order of their blocks: attention adds up in this order, so that a working set
    /// that holds every block gives exactly what a dense cache gives.
    pub fn in_block_order(&self, head: KvHead) -> Vec<(BlockId, SlotId)> {
        let mut slots: Vec<_> = (self.set.head(head).blocks.iter().enumerate())
            .filter_map(|(slot, block)| block.map(|block| (block, SlotId::from(slot))))
            .collect();
        slots.sort_unstable();
        slots
    }
}

/// Everything of one (request, layer) on the device.
#[derive(Debug, Clone)]
pub struct LayerCache {
    /// Summaries of every complete block.
    pub summaries: Summaries,
    /// Working set and tail block.
    pub resident: Resident,
}
