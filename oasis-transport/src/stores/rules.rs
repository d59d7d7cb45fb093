//! What every store refuses.

use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, LayerId, RequestId};
use oasis_core::memory::{BlockWrite, StoreError};
use std::collections::HashSet;

/// Checks writes against a reservation of `blocks` blocks a layer; `exists` tells what is written.
pub(super) fn check(
    geometry: &KvGeometry,
    blocks: usize,
    request: RequestId,
    layer: LayerId,
    writes: &[BlockWrite<'_>],
    exists: impl Fn(BlockId) -> bool,
) -> Result<(), StoreError> {
    let mut seen = HashSet::new();
    for &BlockWrite { block, bytes } in writes {
        let expected = geometry.block_bytes();
        let problem = if layer.index() >= geometry.layers {
            format!("expected a layer below {}", geometry.layers)
        } else if block.index() >= blocks {
            format!("expected a block of the {blocks} that are reserved")
        } else if bytes.len() != expected {
            format!("expected {expected} bytes, found {}", bytes.len())
        } else if exists(block) || !seen.insert(block) {
            "is in the store already, and blocks never change".to_owned()
        } else {
            continue;
        };
        return Err(StoreError::Refused { request, layer, block, problem });
    }
    Ok(())
}

/// The answer to a write of a request that has no reservation.
pub(super) fn unreserved(request: RequestId, layer: LayerId, writes: &[BlockWrite<'_>]) -> StoreError {
    let block = writes.first().map_or(BlockId(0), |write| write.block);
    StoreError::Refused { request, layer, block, problem: "the request has no reservation".to_owned() }
}
