//! Reads of blocks that a prefill node has granted.

use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{KvHead, RequestId};
use oasis_core::memory::{EntryKey, KvStore};
use oasis_transport::remote::{BlockRead, MAX_READ_BYTES, PartResult};

/// Blocks of the first `blocks` of every layer of a request of the store.
#[derive(Debug, Clone, Copy)]
pub struct Granted {
    pub request: RequestId,
    pub blocks: usize,
}

/// Reads one part; what the peer asked for is checked before anything is read. `room` is what the answer may still hold.
pub async fn read(
    store: &dyn KvStore,
    geometry: &KvGeometry,
    granted: Granted,
    part: &BlockRead,
    room: &mut usize,
) -> PartResult {
    let BlockRead { layer, blocks, .. } = part;
    let block_bytes = geometry.block_bytes();
    let bytes = blocks.len().saturating_mul(block_bytes);
    // A single block may be larger than any limit.
    if bytes > *room && !(blocks.len() == 1 && *room == MAX_READ_BYTES) {
        return Err(format!("expected at most {MAX_READ_BYTES} bytes a read, found more"));
    }
    if layer.index() >= geometry.layers {
        return Err(format!("expected a layer below {}, found {layer}", geometry.layers));
    }
    if let Some(block) = blocks.iter().find(|block| block.index() >= granted.blocks) {
        return Err(format!("expected a block of the {} that were granted, found {block}", granted.blocks));
    }
    *room = room.saturating_sub(bytes);
    let keys: Vec<EntryKey> = (blocks.iter())
        .flat_map(|&block| {
            let key = move |head| EntryKey { request: granted.request, layer: *layer, block, head: KvHead::from(head) };
            (0..geometry.kv_heads).map(key)
        })
        .collect();
    let fetched = store.fetch(&keys).await.map_err(|error| error.to_string())?;
    let mut answer = Vec::with_capacity(bytes);
    fetched.entries.iter().for_each(|entry| answer.extend_from_slice(entry.bytes()));
    Ok(answer)
}
