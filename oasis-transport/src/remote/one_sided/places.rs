//! Where blocks lie, and the reads that bring them.

use super::super::codec::{Reader, WireError, Writer};
use super::super::message::BlockRead;
use oasis_ucx::Segment;

/// Where the blocks of one request lie in a staging pool. Offsets are bytes from the pool's first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// What the pool holds at `epoch_at` as long as the blocks are lent.
    pub epoch: u64,
    /// Offset of those eight bytes, little-endian.
    pub epoch_at: u64,
    /// Offsets `[layers][blocks]`.
    pub layers: Vec<Vec<u64>>,
}

impl Places {
    pub(in super::super) fn write(&self, w: &mut Writer) {
        w.u64(self.epoch);
        w.u64(self.epoch_at);
        w.count(self.layers.len());
        self.layers.iter().for_each(|layer| w.u64s(layer));
    }

    pub(in super::super) fn read(r: &mut Reader<'_>) -> Result<Self, WireError> {
        let (epoch, epoch_at) = (r.u64()?, r.u64()?);
        Ok(Self { epoch, epoch_at, layers: r.list(4, |r| r.list(8, Reader::u64))? })
    }

    /// Adds the reads that bring the blocks of `part` to `local` and behind it. Blocks that lie side by side at both ends
    /// are one read, together with what `segments` ends with.
    ///
    /// # Errors
    /// When a block is not one of them.
    pub(super) fn plan(
        &self,
        part: &BlockRead,
        block_bytes: usize,
        mut local: usize,
        segments: &mut Vec<Segment>,
    ) -> Result<(), String> {
        let layer = (self.layers.get(part.layer.index()))
            .ok_or_else(|| format!("expected a layer below {}, found {}", self.layers.len(), part.layer))?;
        let place = |block: &oasis_core::ids::BlockId| {
            let place = layer.get(block.index()).copied();
            place.ok_or_else(|| format!("expected a block of the {} that were granted, found {block}", layer.len()))
        };
        let places: Vec<u64> = part.blocks.iter().map(place).collect::<Result<_, _>>()?;
        for remote in places {
            match segments.last_mut() {
                Some(last)
                    if last.remote.checked_add(last.len as u64) == Some(remote) && last.local + last.len == local =>
                {
                    last.len += block_bytes;
                }
                _ => segments.push(Segment { local, remote, len: block_bytes }),
            }
            local += block_bytes;
        }
        Ok(())
    }
}
