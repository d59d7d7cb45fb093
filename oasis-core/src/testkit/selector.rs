//! Conformance of selectors, and the naive oracle of capped LRU admission.

use super::{Random, for_all};
use crate::ids::{BlockId, KvHead, LayerId, SlotId, Step};
use crate::policy::{LinkRate, SelectBatch, SelectRequest, Selector, SelectorSpec};
use crate::working_set::{Admission, HeadSet, RankedBlock, Ranking, TransferPlan, WorkingSet, top_k};
use std::collections::HashSet;
use std::time::Duration;

/// Checks the obligations of [`Selector`] on random working sets and rankings: at most C admissions a head, each a
/// wanted block that is not resident, none twice, each in a slot of its own that is free or holds an unwanted block;
/// the same arguments, the speed of the link among them, give the same plan. A cap that follows the link never exceeds C,
/// is there with and without a measurement, and admits what the plan does. K runs from 1 to above the number of blocks;
/// rankings may be empty, shorter than K and full of ties.
///
/// # Panics
/// When an obligation is broken.
pub fn conforms(spec: &dyn SelectorSpec) {
    for_all(300, |random| {
        let case = SelectCase::random(random);
        let mut selector = build(spec);
        let plan = case.plan(&mut *selector);
        let cap = selector.cap(case.slots).min(case.slots);
        let cap_now = |link| selector.cap_by_link(case.slots, case.have.len() * case.want.kv_heads(), link);
        assert_eq!(cap_now(case.link).is_some(), cap_now(None).is_some(), "a cap follows the link always or never");
        let cap = cap_now(case.link).map_or(cap, |now| {
            assert!(now <= cap, "expected a cap of at most {cap}, found {now}");
            now
        });
        for (index, have) in case.have.iter().enumerate() {
            plan.check(index, &case.want, have, cap).unwrap_or_else(|error| panic!("{error}"));
            for head in (0..have.kv_heads()).map(KvHead::from) {
                check_head(plan.head(index, head), case.want.head(index, head), have.head(head), cap);
            }
        }
        assert_eq!(case.plan(&mut *selector), plan, "the same arguments give another plan");
        assert_eq!(case.plan(&mut *build(spec)), plan, "a fresh selector gives another plan");
    });
    let nothing = SelectCase { slots: 4, want: Ranking::new(0, 2), have: Vec::new(), link: None };
    assert!(nothing.plan(&mut *build(spec)).is_empty());
}

/// Checks that a selector plans exactly what [`capped_lru`] does, with its own cap.
///
/// # Panics
/// When a plan differs.
pub fn equals_capped_lru(spec: &dyn SelectorSpec) {
    for_all(300, |random| {
        let case = SelectCase::random(random);
        let mut selector = build(spec);
        let plan = case.plan(&mut *selector);
        let cap = selector.cap(case.slots);
        for (index, have) in case.have.iter().enumerate() {
            for head in (0..have.kv_heads()).map(KvHead::from) {
                let expected = capped_lru(case.want.head(index, head), have.head(head), cap);
                assert_eq!(plan.head(index, head), expected, "{have:?}, {:?}", case.want);
            }
        }
    });
}

/// Capped LRU admission, written as naively as possible: time and again the best wanted block that is outside takes the
/// first free slot or, when there is none, the one with an unwanted block that was wanted least recently.
pub fn capped_lru(want: &[RankedBlock], have: HeadSet<'_>, cap: usize) -> Vec<Admission> {
    let wanted: HashSet<BlockId> = want.iter().map(|w| w.block).collect();
    let mut blocks = have.blocks.to_vec();
    let mut plan = Vec::new();
    while plan.len() < cap {
        let Some(block) = want.iter().map(|w| w.block).find(|block| !blocks.contains(&Some(*block))) else { break };
        let mut victim: Option<usize> = None;
        for slot in 0..blocks.len() {
            // `blocks` grows by what is planned, which is wanted and so never a victim.
            let better = match (blocks[slot], victim.map(|v| (blocks[v], have.last_selected[v]))) {
                (Some(block), _) if wanted.contains(&block) => false,
                (_, None) => true,
                (None, Some((best, _))) => best.is_some(),
                (Some(_), Some((best, step))) => best.is_some() && have.last_selected[slot] < step,
            };
            if better {
                victim = Some(slot);
            }
        }
        let Some(slot) = victim else { break };
        blocks[slot] = Some(block);
        plan.push(Admission { block, slot: SlotId::from(slot) });
    }
    plan
}

/// A random selection.
struct SelectCase {
    slots: usize,
    want: Ranking,
    have: Vec<WorkingSet>,
    link: Option<LinkRate>,
}

impl SelectCase {
    fn random(random: &mut Random) -> Self {
        let (slots, kv_heads) = (random.pick(&[1, 2, 3, 8, 20, 40]), random.within(1, 3));
        let requests = random.within(1, 3);
        let mut case = Self { slots, want: Ranking::new(requests, kv_heads), have: Vec::new(), link: None };
        for request in 0..requests {
            let mut have = WorkingSet::new(kv_heads, slots);
            for head in (0..kv_heads).map(KvHead::from) {
                let blocks = random.within(0, 30);
                fill(random, &mut have, head, blocks);
                // Few distinct scores, so that ties are common.
                let scores: Vec<f32> =
                    (0..blocks).map(|_| if random.one_in(9) { f32::NAN } else { random.below(4) as f32 }).collect();
                let budget = random.pick(&[0, 1, slots / 2, slots]);
                case.want.set(request, head, top_k(&scores, budget));
            }
            case.have.push(have);
        }
        for have in &mut case.have {
            for step in (5..5 + random.below(4) as u64).map(Step) {
                let wanted = (0..30).filter(|_| random.one_in(2)).map(BlockId::from).collect();
                have.touch(KvHead::from(random.below(kv_heads)), &wanted, step);
            }
        }
        case.link = (!random.one_in(3)).then(|| LinkRate {
            entry: Duration::from_nanos(random.below(5000) as u64),
            interval: Duration::from_nanos(random.below(100_000) as u64),
        });
        case
    }

    fn plan(&self, selector: &mut dyn Selector) -> TransferPlan {
        let requests: Vec<_> = self.have.iter().map(|have| SelectRequest { have }).collect();
        let mut plan = TransferPlan::new(requests.len(), self.want.kv_heads());
        let batch = SelectBatch { layer: LayerId(0), want: &self.want, requests: &requests, link: self.link };
        selector.plan(&batch, &mut plan);
        plan
    }
}

/// Puts distinct blocks below `blocks` into some slots, wanted at random steps.
fn fill(random: &mut Random, have: &mut WorkingSet, head: KvHead, blocks: usize) {
    let mut order: Vec<usize> = (0..blocks).collect();
    random.shuffle(&mut order);
    let density = random.within(1, 4);
    for slot in 0..have.slots() {
        if random.below(4) < density
            && let Some(block) = order.pop()
        {
            let step = Step(random.below(5) as u64);
            have.place(head, Admission { block: BlockId::from(block), slot: SlotId::from(slot) }, step);
        }
    }
}

fn build(spec: &dyn SelectorSpec) -> Box<dyn Selector> {
    spec.build().unwrap_or_else(|error| panic!("{spec:?} does not build: {error}"))
}

/// The obligations once more, without the code that checks them in production.
fn check_head(plan: &[Admission], want: &[RankedBlock], have: HeadSet<'_>, cap: usize) {
    let wanted: HashSet<BlockId> = want.iter().map(|w| w.block).collect();
    let resident: HashSet<BlockId> = have.blocks.iter().flatten().copied().collect();
    let blocks: HashSet<BlockId> = plan.iter().map(|a| a.block).collect();
    let slots: HashSet<SlotId> = plan.iter().map(|a| a.slot).collect();
    assert!(plan.len() <= cap, "{} admissions, the cap is {cap}", plan.len());
    assert!(blocks.len() == plan.len() && slots.len() == plan.len(), "something is named twice: {plan:?}");
    assert!(blocks.is_subset(&wanted) && blocks.is_disjoint(&resident), "not a miss: {plan:?}");
    for slot in slots {
        let victim = have.blocks[slot.index()];
        assert!(victim.is_none_or(|block| !wanted.contains(&block)), "slot {slot} holds a wanted block");
    }
}
