//! Whether a state that another executor sent fits this one.

use crate::layout::BLOCK_TOKENS;
use oasis_core::geometry::KvGeometry;
use oasis_core::hand_over::{DraftWidths, HandOver, LayerHandOver, expect_count};
use oasis_core::ids::Step;

/// Steps that a peer may name: half of what the device counts to.
const MAX_STEP: u64 = 1 << 31;

/// What a state must fit.
#[derive(Debug, Clone, Copy)]
pub struct Fit {
    pub geometry: KvGeometry,
    /// Slots of a KV head.
    pub slots: usize,
    /// Bytes of a tile of summaries; 0 where there are none.
    pub tile_bytes: usize,
    /// 1 where selections wait for the step's own query: they see the block that a step completes in the next step only.
    pub lag: usize,
    /// Elements of a step's queries; 0 where choices are not corrected.
    pub query: usize,
    /// `None` without a draft head.
    pub draft: Option<DraftWidths>,
}

/// Where a request stands once its first decode step has been run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Tokens whose KV is cached.
    pub position: usize,
    /// Blocks that have been ranked, and are in the store.
    pub blocks: usize,
}

impl Place {
    /// Tokens of the block being filled.
    pub fn tail_tokens(self) -> usize {
        self.position - self.blocks * BLOCK_TOKENS
    }

    /// Which of the two tail entries is being filled.
    pub fn tail(self) -> usize {
        self.blocks % 2
    }

    /// Tiles of summaries of a KV head.
    pub fn tiles(self) -> usize {
        (self.position / BLOCK_TOKENS).div_ceil(BLOCK_TOKENS)
    }
}

impl Fit {
    /// Where a request of `position` cached tokens stands, at least one of them of a decode step.
    pub fn place(&self, position: usize) -> Place {
        Place { position, blocks: (position - self.lag) / BLOCK_TOKENS }
    }

    /// Whether a state fits a request of `prompt` tokens that has room for `end`; said in words where it does not.
    pub fn check(&self, prompt: usize, end: usize, state: &HandOver) -> Result<(), String> {
        expect_count("prompt tokens", prompt, state.prompt_tokens)?;
        expect_count("layers", self.geometry.layers, state.layers.len())?;
        let position = state.position();
        if state.steps == 0 || position > end {
            return Err(format!("expected {} to {end} cached tokens, found {position}", prompt + 1));
        }
        if state.last_step > Step(MAX_STEP) {
            return Err(format!("expected a step of at most {MAX_STEP}, found {}", state.last_step));
        }
        let place = self.place(position);
        for (layer, state_of) in state.layers.iter().enumerate() {
            self.check_layer(place, state.last_step, state_of)
                .map_err(|problem| format!("layer {layer}: {problem}"))?;
        }
        state.check_draft(&self.geometry, self.draft)
    }

    fn check_layer(&self, place: Place, last_step: Step, state: &LayerHandOver) -> Result<(), String> {
        let words = self.geometry.kv_heads * place.tiles() * self.tile_bytes / size_of::<u32>();
        state.check(&self.geometry, place.position, self.slots, words)?;
        expect_count("elements of a query", self.query, state.query.len())?;
        expect_count("complete blocks", place.blocks, state.blocks(&self.geometry, place.position).unwrap_or(0))?;
        for held in &state.slots {
            // Attention reads the first slots, as many as there are blocks for.
            expect_count("occupied slots", place.blocks.min(self.slots), held.len())?;
            if let Some((place, held)) = held.iter().enumerate().find(|(place, held)| held.slot.index() != *place) {
                return Err(format!("expected slot {place} to be occupied, found slot {}", held.slot));
            }
            if let Some(held) = held.iter().find(|held| held.last_selected > last_step) {
                return Err(format!("expected no step after {last_step}, found {}", held.last_selected));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::geometry::KvDtype;
    use oasis_core::hand_over::DraftHandOver;
    use oasis_core::ids::{BlockId, SlotId};
    use oasis_core::working_set::HeldSlot;

    const TILE: usize = 16 * 256;

    fn fit(lag: usize) -> Fit {
        let geometry = KvGeometry {
            layers: 2,
            q_heads: 4,
            kv_heads: 2,
            head_dim: 64,
            block_tokens: BLOCK_TOKENS,
            dtype: KvDtype::Bf16,
        };
        let draft = Some(DraftWidths { token: 64, taps: 96, blocks: Some(3) });
        Fit { geometry, slots: 3, tile_bytes: TILE, lag, query: 0, draft }
    }

    /// What a request of `position` tokens hands over, 5 of them decoded.
    fn state(fit: &Fit, position: usize) -> HandOver {
        let place = fit.place(position);
        let slot = |slot: usize| HeldSlot {
            slot: SlotId::from(slot),
            block: BlockId::from(place.blocks - 1 - slot),
            last_selected: Step(4 + slot as u64),
            times_selected: 1,
        };
        let layer = LayerHandOver {
            summaries: vec![0; 2 * place.tiles() * TILE / 4],
            tail: vec![0.0; place.tail_tokens() * 2 * 2 * 64],
            query: Vec::new(),
            slots: vec![(0..place.blocks.min(fit.slots)).map(slot).collect(); 2],
        };
        // Of 3 blocks, the newest incomplete.
        let seen = position - 1;
        let rows = vec![0.0; 64 * if seen <= 48 { seen } else { 33 + (seen - 1) % 16 }];
        HandOver {
            prompt_tokens: position - 5,
            steps: 5,
            last_step: Step(7),
            sampler_words: 0,
            layers: vec![layer; 2],
            draft: Some(DraftHandOver { keys: rows.clone(), values: rows, taps: vec![0.0; 96] }),
        }
    }

    #[test]
    fn a_completed_block_is_in_the_tail_where_its_selection_is_still_to_come() {
        let place = |lag, position| {
            let place = fit(lag).place(position);
            (place.blocks, place.tail_tokens(), place.tail(), place.tiles())
        };
        assert_eq!([place(0, 15), place(0, 16), place(0, 17)], [(0, 15, 0, 0), (1, 0, 1, 1), (1, 1, 1, 1)]);
        assert_eq!([place(1, 15), place(1, 16), place(1, 17)], [(0, 15, 0, 0), (0, 16, 0, 1), (1, 1, 1, 1)]);
        // The seventeenth block begins a second tile.
        assert_eq!([place(1, 271), place(1, 272)], [(16, 15, 0, 1), (16, 16, 0, 2)]);
    }

    #[test]
    fn states_at_every_place_of_a_block_fit() {
        for (lag, position) in (0..2).flat_map(|lag| (6..300).map(move |position| (lag, position))) {
            let fit = fit(lag);
            fit.check(position - 5, position, &state(&fit, position)).unwrap();
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        type Change = fn(&mut HandOver);
        let changes: [(Change, &str); 14] = [
            (|s| s.prompt_tokens -= 1, "prompt tokens"),
            (|s| s.layers.truncate(1), "layers"),
            (|s| s.steps = 0, "cached tokens"),
            (|s| s.steps = 40, "cached tokens"),
            (|s| s.last_step = Step(MAX_STEP + 1), "a step of at most"),
            (|s| s.last_step = Step(5), "layer 0: expected no step after 5, found 6"),
            (|s| s.layers[1].summaries.truncate(9), "layer 1: expected 2048 words of summaries"),
            (|s| s.layers[1].tail.truncate(9), "the tail block"),
            (|s| s.layers[0].query.extend([0.0; 256]), "elements of a query"),
            (|s| s.layers[0].slots[1].truncate(2), "expected 3 occupied slots, found 2"),
            (|s| s.layers[0].slots[0][2].slot = SlotId(3), "below 3, found slot 3"),
            (|s| drop(s.draft.take()), "expected the state of a draft head"),
            (|s| s.draft.as_mut().unwrap().values.truncate(9), "draft values"),
            (|s| s.draft.as_mut().unwrap().taps.truncate(9), "draft taps"),
        ];
        let fit = fit(0);
        for (change, expected) in changes {
            let mut changed = state(&fit, 70);
            change(&mut changed);
            let problem = fit.check(65, 80, &changed).unwrap_err();
            assert!(problem.contains(expected), "{problem}");
        }
        // A full tail fits no executor that has promoted its block already, and the other way round.
        let [beside, behind] = [0, 1].map(super::tests::fit);
        let problem = beside.check(59, 80, &state(&behind, 64)).unwrap_err();
        assert!(problem.contains("expected 4 complete blocks, found 3"), "{problem}");
        let problem = behind.check(59, 80, &state(&beside, 64)).unwrap_err();
        assert!(problem.contains("expected 3 complete blocks, found 4"), "{problem}");
        let corrects = Fit { query: 256, ..beside };
        let problem = corrects.check(65, 80, &state(&beside, 70)).unwrap_err();
        assert!(problem.contains("expected 256 elements of a query, found 0"), "{problem}");
        let without = Fit { draft: None, ..beside };
        assert!(without.check(65, 80, &state(&beside, 70)).unwrap_err().contains("expected no draft state"));
    }

    #[test]
    fn a_working_set_has_no_holes() {
        let fit = Fit { slots: 8, ..fit(0) };
        let mut state = state(&fit, 70);
        state.layers[0].slots[1][3].slot = SlotId(5);
        let problem = fit.check(65, 80, &state).unwrap_err();
        assert!(problem.contains("expected slot 3 to be occupied, found slot 5"), "{problem}");
    }
}
