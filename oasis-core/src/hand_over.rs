//! A request on its way from one executor to another, as from a prefill node to a decode node.
//!
//! It holds everything but the blocks: those lie in the first executor's store and are read from there.

use crate::executor::{Admission, Executor, RequestError, Sequence};
use crate::geometry::KvGeometry;
use crate::ids::{BlockId, RequestId, Step};
use crate::working_set::{BlockSet, HeldSlot};

/// An executor whose requests may begin on another one, or go on on it.
///
/// Obligations:
/// - A request that was handed over says the tokens it would have said without; so both executors run the same weights and
///   policies, and agree on the layout of entries and summaries.
/// - What another executor sent is checked before it is used.
pub trait HandsOver: Executor {
    /// Sets memory aside for a request whose prompt another executor reads; [`take_over`](Self::take_over) brings it.
    ///
    /// # Errors
    /// As [`Executor::admit`].
    fn expect(&mut self, sequence: Sequence) -> anyhow::Result<Admission>;

    /// Takes over an expected request; the blocks of its working set are fetched from this executor's store.
    ///
    /// # Errors
    /// When the state does not fit the request or this executor, or the store fails: the request must then be released.
    fn take_over(&mut self, request: RequestId, state: &HandOver) -> Result<(), RequestError>;

    /// Gives a request away between two decode steps: its device memory is free, and this executor knows it no more. Its
    /// blocks stay in the store, those of dense layers included, until the store is told to release them.
    ///
    /// # Errors
    /// When the request has not read its prompt, has failed, or the store fails: it must then be released.
    fn hand_over(&mut self, request: RequestId) -> Result<HandOver, RequestError>;

    /// Prompts of requests to be handed over that are read in turn, a chunk of a layer each, so that a short one does not
    /// wait for a long one. One, where a prompt that has begun must be read to its end.
    fn prompts_in_turn(&self) -> usize {
        1
    }
}

impl<E: HandsOver + ?Sized> HandsOver for Box<E> {
    fn expect(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        (**self).expect(sequence)
    }

    fn take_over(&mut self, request: RequestId, state: &HandOver) -> Result<(), RequestError> {
        (**self).take_over(request, state)
    }

    fn hand_over(&mut self, request: RequestId) -> Result<HandOver, RequestError> {
        (**self).hand_over(request)
    }

    fn prompts_in_turn(&self) -> usize {
        (**self).prompts_in_turn()
    }
}

/// State of a request between two decode steps.
#[derive(Debug, Clone, PartialEq)]
pub struct HandOver {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Decode steps that were run; prompt and steps together are the tokens whose KV is cached.
    pub steps: u64,
    /// Step that the working sets' newest choice was made in.
    pub last_step: Step,
    /// 32-bit words drawn from the sampler's random sequence.
    pub sampler_words: u64,
    /// One a layer.
    pub layers: Vec<LayerHandOver>,
    /// The draft head's state, where the predictor asks for it.
    pub draft: Option<DraftHandOver>,
}

impl HandOver {
    /// Tokens whose KV is cached.
    pub fn position(&self) -> usize {
        self.prompt_tokens.saturating_add(usize::try_from(self.steps).unwrap_or(usize::MAX))
    }

    /// Blocks that lie in the store, one count a layer: the rest travels as tails. 0 where a tail does not fit.
    pub fn stored_blocks(&self, geometry: &KvGeometry) -> Vec<usize> {
        self.layers.iter().map(|layer| layer.blocks(geometry, self.position()).unwrap_or(0)).collect()
    }
}

/// One layer of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayerHandOver {
    /// Summaries of every complete block, `[kv_heads][blocks][rows_per_block][row_words]`, or in whole tiles where the
    /// executor keeps tiles; empty where all blocks stay on the device, or none is summarised.
    pub summaries: Vec<u32>,
    /// The block being filled: keys and values of its tokens, `[tokens][2][kv_heads][head_dim]`. It is full where the next
    /// step completes it before its attention.
    pub tail: Vec<f32>,
    /// Query of the step before, `[kv_heads][group][head_dim]`; empty where choices are not corrected.
    pub query: Vec<f32>,
    /// Occupied slots, one list a KV head, in slot order.
    pub slots: Vec<Vec<HeldSlot>>,
}

impl LayerHandOver {
    /// Of the first `blocks` blocks those that at least one KV head holds, in order: what has to travel before the next
    /// step, whole blocks at a time.
    pub fn union(&self, blocks: usize) -> Vec<BlockId> {
        let mut seen = BlockSet::default();
        let held = self.slots.iter().flatten().map(|held| held.block).filter(|block| block.index() < blocks);
        let mut blocks: Vec<BlockId> = held.filter(|&block| seen.insert(block)).collect();
        blocks.sort_unstable();
        blocks
    }

    /// Complete blocks after `position` tokens; `None` where the tail block does not fit those.
    pub fn blocks(&self, geometry: &KvGeometry, position: usize) -> Option<usize> {
        let token = 2 * geometry.kv_heads * geometry.head_dim;
        let tokens = self.tail.len() / token;
        let before = position.checked_sub(tokens)?;
        let fits = self.tail.len().is_multiple_of(token) && tokens <= geometry.block_tokens;
        (fits && before.is_multiple_of(geometry.block_tokens)).then(|| geometry.full_blocks(before))
    }

    /// Whether the layer fits an executor that has `slots` slots a KV head and `summary_words` words of summaries in all KV
    /// heads together, after `position` tokens. What a peer sent is checked by this before it is used.
    ///
    /// # Errors
    /// What does not fit, in words.
    pub fn check(
        &self,
        geometry: &KvGeometry,
        position: usize,
        slots: usize,
        summary_words: usize,
    ) -> Result<(), String> {
        let KvGeometry { kv_heads, head_dim, block_tokens, .. } = *geometry;
        let blocks = self.blocks(geometry, position).ok_or_else(|| {
            let expected = position % block_tokens * 2 * kv_heads * head_dim;
            format!("expected {expected} elements of the tail block, found {}", self.tail.len())
        })?;
        expect_count("words of summaries", summary_words, self.summaries.len())?;
        if !self.query.is_empty() {
            expect_count("elements of a query", geometry.q_heads * head_dim, self.query.len())?;
        }
        expect_count("KV heads with slots", kv_heads, self.slots.len())?;
        for held in &self.slots {
            let mut seen = BlockSet::default();
            let mut next_slot = 0;
            for HeldSlot { slot, block, .. } in held {
                if slot.index() >= slots || slot.index() < next_slot {
                    return Err(format!("expected slots in order and below {slots}, found slot {slot}"));
                }
                if block.index() >= blocks || !seen.insert(*block) {
                    return Err(format!("expected distinct blocks below {blocks}, found block {block}"));
                }
                next_slot = slot.index() + 1;
            }
        }
        Ok(())
    }
}

/// The draft head's state: its KV and the taps of the last position.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DraftHandOver {
    /// `[kv_heads][positions][head_dim]`
    pub keys: Vec<f32>,
    /// `[kv_heads][positions][head_dim]`
    pub values: Vec<f32>,
    /// Target taps of the last position, `[3 * target_hidden]`.
    pub taps: Vec<f32>,
}

/// Sizes of what an executor keeps of a request's draft head.
#[derive(Debug, Clone, Copy)]
pub struct DraftWidths {
    /// Elements of a position's keys; values are as many.
    pub token: usize,
    /// Elements of a position's taps.
    pub taps: usize,
    /// Newest blocks whose KV is kept; `None`: all.
    pub blocks: Option<usize>,
}

impl HandOver {
    /// Whether the draft head's state fits an executor that expects `widths`, `None` for no head.
    ///
    /// # Errors
    /// What does not fit, in words.
    pub fn check_draft(&self, geometry: &KvGeometry, widths: Option<DraftWidths>) -> Result<(), String> {
        match (&self.draft, widths) {
            (None, None) => Ok(()),
            (Some(draft), Some(DraftWidths { token, taps, blocks })) => {
                // The token at the newest position has not been through the head yet.
                let positions = self.position().saturating_sub(1);
                let elements = (positions - geometry.window_start(positions, blocks)) * token;
                expect_count("elements of draft keys", elements, draft.keys.len())?;
                expect_count("elements of draft values", elements, draft.values.len())?;
                expect_count("elements of draft taps", taps, draft.taps.len())
            }
            (Some(_), None) => Err("expected no draft state, found some".to_owned()),
            (None, Some(_)) => Err("expected the state of a draft head, found none".to_owned()),
        }
    }
}

/// Whether a peer sent as many of something as are expected.
///
/// # Errors
/// Both numbers, in words.
pub fn expect_count(what: &str, expected: usize, found: usize) -> Result<(), String> {
    match expected == found {
        true => Ok(()),
        false => Err(format!("expected {expected} {what}, found {found}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::KvDtype;
    use crate::ids::SlotId;

    const GEOMETRY: KvGeometry =
        KvGeometry { layers: 1, q_heads: 4, kv_heads: 2, head_dim: 2, block_tokens: 4, dtype: KvDtype::F32 };

    fn held(slot: u32, block: u32) -> HeldSlot {
        HeldSlot { slot: SlotId(slot), block: BlockId(block), last_selected: Step(1), times_selected: 1 }
    }

    /// 14 tokens: 3 blocks and 2 tokens.
    fn layer() -> LayerHandOver {
        LayerHandOver {
            summaries: vec![0; 2 * 3 * 5],
            tail: vec![0.0; 2 * 2 * 2 * 2],
            query: vec![0.0; 8],
            slots: vec![vec![held(0, 2), held(1, 0)], vec![held(1, 2)]],
        }
    }

    #[test]
    fn the_union_has_each_block_once_and_in_order() {
        assert_eq!(layer().union(3), [BlockId(0), BlockId(2)]);
        assert_eq!(layer().union(2), [BlockId(0)], "what a peer made up is left out");
    }

    #[test]
    fn a_full_tail_is_not_a_block_yet() {
        let blocks = |tokens: usize, position| {
            LayerHandOver { tail: vec![0.0; tokens * 8], ..layer() }.blocks(&GEOMETRY, position)
        };
        assert_eq!([blocks(2, 14), blocks(0, 12), blocks(4, 12)], [Some(3), Some(3), Some(2)]);
        assert_eq!([blocks(2, 12), blocks(4, 14), blocks(8, 12), blocks(4, 3)], [None; 4]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let check = |layer: &LayerHandOver| layer.check(&GEOMETRY, 14, 2, 2 * 3 * 5);
        check(&layer()).unwrap();
        type Change = fn(&mut LayerHandOver);
        let changes: [(Change, &str); 8] = [
            (|l| l.summaries.truncate(29), "words of summaries"),
            (|l| l.tail.push(0.0), "tail block"),
            (|l| l.query.truncate(3), "a query"),
            (|l| l.slots.truncate(1), "KV heads"),
            (|l| l.slots[0][1].slot = SlotId(2), "slot 2"),
            (|l| l.slots[0][1].slot = SlotId(0), "slot 0"),
            (|l| l.slots[1][0].block = BlockId(3), "block 3"),
            (|l| l.slots[0][1].block = BlockId(2), "block 2"),
        ];
        for (change, expected) in changes {
            let mut changed = layer();
            change(&mut changed);
            let problem = check(&changed).unwrap_err();
            assert!(problem.contains(expected), "{problem}");
        }
    }
}
