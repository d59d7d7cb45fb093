//! How granted blocks are read.

use super::message::BlockRead;
use super::one_sided::Places;
use async_trait::async_trait;
use oasis_core::ids::RequestId;
use oasis_core::memory::HostEntry;
use std::sync::Arc;

/// Most bytes of blocks that one read asks for.
pub const MAX_READ_BYTES: usize = 8 << 20;

/// Where blocks of a request lie in the memory of the node that lends them.
#[derive(Debug, Clone, PartialEq)]
pub struct Lent {
    /// The node's staging pool, as `oasis_ucx::Descriptor` encodes it.
    pub pool: Arc<[u8]>,
    /// The blocks in it.
    pub places: Places,
}

/// Answer to one [`BlockRead`]: memory with the bytes `[blocks][kv_heads][entry]`, or why there are none.
pub type ReadResult = Result<HostEntry, String>;

/// How the bytes of granted blocks get here from the node that has them.
///
/// Obligations: an answer comes within the reader's own deadline; after it, no byte is written to memory that the answer
/// did not bring.
#[async_trait]
pub trait BlockReader: Send + Sync {
    /// Blocks of `block_bytes` bytes of a request have been granted; `lent` says where they lie, where the node has said so.
    ///
    /// # Errors
    /// Why they cannot be read.
    async fn granted(&self, request: RequestId, block_bytes: usize, lent: Option<&Lent>) -> Result<(), String> {
        let _ = (request, block_bytes, lent);
        Ok(())
    }

    /// Reads blocks, all parts in one batch; one answer a part.
    async fn read(&self, parts: Vec<BlockRead>) -> Vec<ReadResult>;

    /// Tells the node that a request needs its blocks no more.
    fn release(&self, request: RequestId);
}
