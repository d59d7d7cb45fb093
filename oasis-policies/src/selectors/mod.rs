//! Selectors: which wanted blocks are admitted, and which residents make room.

mod adaptive_cap;
mod capped_lru;
mod fetch_all;
mod hysteresis;
mod lfu;
mod static_set;

pub use adaptive_cap::AdaptiveCap;
pub use capped_lru::CappedLru;
pub use fetch_all::FetchAll;
pub use hysteresis::Hysteresis;
pub use lfu::Lfu;
pub use static_set::StaticSet;

use oasis_core::ids::{KvHead, SlotId};
use oasis_core::policy::{DeviceCode, SelectBatch, SelectRequest, SpecError};
use oasis_core::working_set::{Admission, BlockSet, HeadSet, RankedBlock, TransferPlan};

/// The order of admissions and victims of the selectors that differ in nothing but the cap.
const LRU_ORDER: DeviceCode = DeviceCode::new("lru_order.cuh", include_str!("lru_order.cuh"));

/// Admissions a KV head and step that a part of `budget` comes to: `max(1, floor(ratio * budget))`, none for a ratio of 0.
pub fn cap_of(ratio: f64, budget: usize) -> usize {
    if ratio == 0.0 {
        return 0;
    }
    // 0.29 * 100 is a little less than 29 in binary; a ratio is meant as it is written.
    ((ratio * budget as f64 + 1e-9) as usize).max(1)
}

/// Checks that the field `field` is a part of the working set.
fn check_ratio(field: &'static str, ratio: f64) -> Result<(), SpecError> {
    if (0.0..=1.0).contains(&ratio) {
        return Ok(());
    }
    Err(SpecError::new(field, "a number from 0 to 1", ratio)
        .hint("it is a part of the working set: 0.05 admits 6 of 128 blocks a step"))
}

/// Pairs the best-ranked misses of every head with the least recently wanted residents, at most `cap(slots)` a head.
fn pair_misses_with_victims(batch: &SelectBatch<'_>, plan: &mut TransferPlan, cap: impl Fn(usize) -> usize) {
    pair_by(batch, plan, cap, |have, want| have.victims(want), |misses, _, _| misses.len());
}

/// Pairs the best-ranked misses of every head with victims, at most `cap(slots)` a head.
///
/// `victims` lists the slots whose blocks are not wanted, free ones first. `admissible` says how many of a head's misses,
/// best first, may enter, given how many slots are free and all that the head wants.
fn pair_by(
    batch: &SelectBatch<'_>,
    plan: &mut TransferPlan,
    cap: impl Fn(usize) -> usize,
    victims: impl Fn(&HeadSet<'_>, &BlockSet) -> Vec<SlotId>,
    admissible: impl Fn(&[RankedBlock], usize, &[RankedBlock]) -> usize,
) {
    for (request, SelectRequest { have }) in batch.requests.iter().enumerate() {
        let cap = cap(have.slots());
        for head in (0..have.kv_heads()).map(KvHead::from) {
            let (want, wanted) = (batch.want.head(request, head), batch.want.wanted(request, head));
            let have = have.head(head);
            let resident = have.residents();
            let misses: Vec<RankedBlock> =
                want.iter().filter(|w| !resident.contains(w.block)).take(cap).copied().collect();
            if misses.is_empty() {
                continue;
            }
            let free = have.blocks.iter().filter(|block| block.is_none()).count();
            let count = admissible(&misses, free, want);
            for (miss, slot) in misses.iter().take(count).zip(victims(&have, wanted)) {
                plan.push(request, head, Admission { block: miss.block, slot });
            }
        }
    }
}
