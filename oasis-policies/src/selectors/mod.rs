//! Selectors: which wanted blocks are admitted, and which residents make room.

mod capped_lru;
mod fetch_all;
mod static_set;

pub use capped_lru::CappedLru;
pub use fetch_all::FetchAll;
pub use static_set::StaticSet;

use oasis_core::ids::{BlockId, KvHead};
use oasis_core::policy::{DeviceCode, SelectBatch, SelectRequest};
use oasis_core::working_set::{Admission, RankedBlock, TransferPlan, WorkingSet};

/// The order of admissions and victims that all selectors here share; they differ in the cap.
const LRU_ORDER: DeviceCode = DeviceCode { name: "lru_order.cuh", source: include_str!("lru_order.cuh") };

/// Pairs the best-ranked misses of every head with the least recently wanted residents, at most `cap(slots)` a head.
fn pair_misses_with_victims(batch: &SelectBatch<'_>, plan: &mut TransferPlan, cap: impl Fn(usize) -> usize) {
    for (request, SelectRequest { have }) in batch.requests.iter().enumerate() {
        let cap = cap(have.slots());
        for head in (0..have.kv_heads()).map(KvHead::from) {
            for admission in pair_head(batch.want.head(request, head), have, head, cap) {
                plan.push(request, head, admission);
            }
        }
    }
}

fn pair_head(want: &[RankedBlock], have: &WorkingSet, head: KvHead, cap: usize) -> Vec<Admission> {
    let have = have.head(head);
    let mut resident: Vec<BlockId> = have.blocks.iter().flatten().copied().collect();
    resident.sort_unstable();
    let mut wanted: Vec<BlockId> = want.iter().map(|w| w.block).collect();
    let misses: Vec<BlockId> =
        wanted.iter().filter(|block| resident.binary_search(block).is_err()).take(cap).copied().collect();
    if misses.is_empty() {
        return Vec::new();
    }
    wanted.sort_unstable();
    let pairs = misses.into_iter().zip(have.victims(&wanted));
    pairs.map(|(block, slot)| Admission { block, slot }).collect()
}
