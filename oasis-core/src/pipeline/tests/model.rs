//! Random runs of the whole pipeline against a plain model of the working set's rules.

use super::foreground::{Foreground, GEOMETRY, vector};
use super::parts;
use crate::ids::{BlockId, KvHead, LayerId, RequestId, Step};
use crate::pipeline::{PipelineParts, Tracer};
use crate::testkit::selector::capped_lru;
use crate::testkit::{Random, for_all};
use crate::working_set::{HeadSet, RankedBlock};
use std::collections::HashMap;

/// One (request, layer, KV head): block and last wanting step of each slot.
struct Head {
    blocks: Vec<Option<BlockId>>,
    steps: Vec<Step>,
}

struct Model {
    budget: usize,
    cap: usize,
    heads: HashMap<(RequestId, LayerId, KvHead), Head>,
}

impl Model {
    /// The background work of one step for a request of which `tokens` tokens exist.
    fn step(&mut self, id: RequestId, tokens: usize, step: Step, query: &[f32]) {
        for layer in (0..GEOMETRY.layers).map(LayerId::from) {
            for head in (0..GEOMETRY.kv_heads).map(KvHead::from) {
                let want = self.want(id, layer, head, tokens, query);
                let free = || Head { blocks: vec![None; self.budget], steps: vec![Step(0); self.budget] };
                let (budget, cap) = (self.budget, self.cap);
                // The first fill looks at all heads of the layer: it happens while none holds a block.
                let set = self.heads.entry((id, layer, head)).or_insert_with(free);
                if set.blocks.iter().all(Option::is_none) {
                    for (slot, block) in want.iter().take(budget).enumerate() {
                        set.blocks[slot] = Some(block.block);
                    }
                }
                for slot in 0..budget {
                    if set.blocks[slot].is_some_and(|block| want.iter().any(|w| w.block == block)) {
                        set.steps[slot] = step;
                    }
                }
                if tokens.is_multiple_of(GEOMETRY.block_tokens) {
                    set.promote(BlockId::from(tokens / GEOMETRY.block_tokens - 1), &want, step);
                }
                let have = HeadSet { blocks: &set.blocks, last_selected: &set.steps, times_selected: &[] };
                for admission in capped_lru(&want, have, cap) {
                    set.blocks[admission.slot.index()] = Some(admission.block);
                    set.steps[admission.slot.index()] = step;
                }
            }
        }
    }

    /// The K best complete blocks by the sum of the group's products with a block's first key.
    fn want(&self, id: RequestId, layer: LayerId, head: KvHead, tokens: usize, query: &[f32]) -> Vec<RankedBlock> {
        let group = GEOMETRY.group() * GEOMETRY.head_dim;
        let queries = &query[head.index() * group..][..group];
        let score = |block: usize| -> f32 {
            let key = vector(id, layer, head, block * GEOMETRY.block_tokens, false);
            let dot = |q: &[f32]| -> f32 { q.iter().zip(&key).map(|(q, k)| q * k).sum() };
            queries.chunks_exact(GEOMETRY.head_dim).map(dot).sum()
        };
        let mut want: Vec<RankedBlock> = (0..GEOMETRY.full_blocks(tokens))
            .map(|block| RankedBlock { block: BlockId::from(block), score: score(block) })
            .collect();
        // Stable: ties stay in block order.
        want.sort_by(|a, b| b.score.total_cmp(&a.score));
        want.truncate(self.budget);
        want
    }
}

impl Head {
    fn promote(&mut self, block: BlockId, want: &[RankedBlock], step: Step) {
        if self.blocks.contains(&Some(block)) {
            return;
        }
        // Exactly one admission of an imaginary ranking that wants the new block as well.
        let mut want = want.to_vec();
        want.retain(|w| w.block == block || self.blocks.contains(&Some(w.block)));
        want.retain(|w| w.block != block);
        want.push(RankedBlock { block, score: 0.0 });
        let have = HeadSet { blocks: &self.blocks, last_selected: &self.steps, times_selected: &[] };
        for admission in capped_lru(&want, have, 1) {
            self.blocks[admission.slot.index()] = Some(admission.block);
            self.steps[admission.slot.index()] = step;
        }
    }
}

/// A prompt length around a block edge, at least 1.
fn length(random: &mut Random) -> usize {
    (random.within(0, 7) * GEOMETRY.block_tokens + random.below(3)).saturating_sub(1).max(1)
}

#[test]
fn every_slot_holds_what_the_model_says_and_what_the_store_holds() {
    for_all(60, |random| {
        let budget = random.within(1, 10);
        let cap = random.within(0, budget);
        let mut fg = Foreground::new(PipelineParts { tracer: Tracer::default(), ..parts(budget, cap) });
        let mut model = Model { budget, cap, heads: HashMap::new() };
        let mut next = 1;
        for _ in 0..random.within(3, 12) {
            if fg.requests.len() < 3 && (fg.requests.is_empty() || random.one_in(3)) {
                fg.prefill(RequestId(next), length(random));
                next += 1;
            }
            fg.query = random.floats(GEOMETRY.q_heads * GEOMETRY.head_dim);
            fg.hand_in_all();
            fg.take_back_all();
            for request in &fg.requests {
                model.step(request.id, request.tokens, fg.step, &fg.query);
            }
            fg.check_slots();
            check_model(&fg, &model);
            if random.one_in(4) {
                let id = fg.requests[random.below(fg.requests.len())].id;
                fg.cancel(id);
            }
        }
        let ids: Vec<RequestId> = fg.requests.iter().map(|r| r.id).collect();
        ids.into_iter().for_each(|id| fg.cancel(id));
        assert_eq!((fg.store.usage().used, fg.store.usage().requests), (0, 0));
    });
}

fn check_model(fg: &Foreground, model: &Model) {
    for request in &fg.requests {
        for layer in (0..GEOMETRY.layers).map(LayerId::from) {
            let set = &fg.resident(request.id, layer).set;
            for head in (0..GEOMETRY.kv_heads).map(KvHead::from) {
                let expected = &model.heads[&(request.id, layer, head)];
                assert_eq!(set.head(head).blocks, expected.blocks, "{} layer {layer} head {head}", request.id);
                assert_eq!(set.head(head).last_selected, expected.steps);
                let all = GEOMETRY.full_blocks(request.tokens);
                if model.budget >= all {
                    let resident = set.head(head).blocks.iter().flatten().count();
                    assert_eq!(resident, all, "all blocks fit the budget and are resident");
                }
            }
        }
    }
}
