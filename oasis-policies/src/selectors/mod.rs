//! Selectors: which wanted blocks are admitted, and which residents make room.

mod capped_lru;
mod fetch_all;
mod static_set;

pub use capped_lru::CappedLru;
pub use fetch_all::FetchAll;
pub use static_set::StaticSet;

use oasis_core::ids::{BlockId, KvHead};
use oasis_core::policy::{DeviceCode, SelectBatch, SelectRequest};
use oasis_core::working_set::{Admission, Ranking, TransferPlan, WorkingSet};

/// The order of admissions and victims that all selectors here share; they differ in the cap.
const LRU_ORDER: DeviceCode = DeviceCode { name: "lru_order.cuh", source: include_str!("lru_order.cuh") };

/// Pairs the best-ranked misses of every head with the least recently wanted residents, at most `cap(slots)` a head.
fn pair_misses_with_victims(batch: &SelectBatch<'_>, plan: &mut TransferPlan, cap: impl Fn(usize) -> usize) {
    for (request, SelectRequest { have }) in batch.requests.iter().enumerate() {
        let cap = cap(have.slots());
        for head in (0..have.kv_heads()).map(KvHead::from) {
            for admission in pair_head(batch.want, request, head, have, cap) {
                plan.push(request, head, admission);
            }
        }
    }
}

fn pair_head(want: &Ranking, request: usize, head: KvHead, have: &WorkingSet, cap: usize) -> Vec<Admission> {
    let have = have.head(head);
    let resident = have.residents();
    let misses: Vec<BlockId> = (want.head(request, head).iter().map(|w| w.block))
        .filter(|block| !resident.contains(*block))
        .take(cap)
        .collect();
    if misses.is_empty() {
        return Vec::new();
    }
    let pairs = misses.into_iter().zip(have.victims(want.wanted(request, head)));
    pairs.map(|(block, slot)| Admission { block, slot }).collect()
}
