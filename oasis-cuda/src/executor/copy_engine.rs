//! The gather's work done by the copy engine: the host reads a list of copies back and queues them.

use super::memory::SparseMemory;
use super::parts::Parts;
use crate::device::{Device, DeviceError, MemoryCopy, PinnedBuffer, Stream};
use crate::kernels::{Address, CopyList, EntryCopy};
use crate::layout::entry_bytes;

const HEADER: usize = size_of::<CopyList>();

/// Memory for lists of up to `copies` copies on the way to the host.
pub(super) fn list_landing(device: &Device, copies: usize) -> Result<PinnedBuffer, DeviceError> {
    device.pinned(HEADER + copies * size_of::<EntryCopy>(), &|_| ())
}

impl Parts {
    /// Carries out a layer's list of copies after what `stream` has been given so far, which the host waits for.
    pub fn copy_entries(&self, sparse: &SparseMemory, layer: usize, stream: &Stream) -> Result<(), DeviceError> {
        let Some(landing) = &self.list_landing else { return Ok(()) };
        let list = sparse.list(layer);
        // SAFETY: the landing begins with room for a header; nothing else writes to it.
        unsafe { stream.copy(landing.address(), list, HEADER)? };
        stream.synchronize()?;
        let count = bytemuck::pod_read_unaligned::<CopyList>(&landing.as_slice()[..HEADER]).count as usize;
        if count == 0 {
            return Ok(());
        }
        let (copies, bytes) = (sparse.layers[layer].copies.address(), count * size_of::<EntryCopy>());
        for (at, part) in landing.parts(HEADER, bytes) {
            // SAFETY: a list has no more copies than the landing has room for.
            unsafe { stream.copy(landing.address().offset(HEADER + at), copies.offset(at), part)? };
        }
        stream.synchronize()?;
        let copies: Vec<MemoryCopy> = (bytemuck::cast_slice::<u8, EntryCopy>(&landing.as_slice()[HEADER..][..bytes]))
            .iter()
            .filter(|copy| copy.from != Address::NONE)
            .flat_map(|copy| self.entry_parts(copy))
            .collect();
        // SAFETY: the list was written by a selection: its sources are entries of reserved host memory or tails, its
        // destinations differ, and none is another's source. The count lies at the start of the list.
        unsafe {
            stream.copy_all(&copies)?;
            stream.fill(list, 0, size_of::<u32>())
        }
    }

    /// An entry in host memory may lie in two chunks that were pinned apart.
    fn entry_parts(&self, copy: &EntryCopy) -> Vec<MemoryCopy> {
        let bytes = entry_bytes(self.model.spec.head_dim);
        let host = [copy.from, copy.to].into_iter().find(|side| self.host.as_ref().is_some_and(|h| h.contains(*side)));
        let parts = host.map_or_else(|| vec![(0, bytes)], |host| self.host_parts(host, bytes));
        let part = |(at, bytes)| MemoryCopy { from: copy.from.offset(at), to: copy.to.offset(at), bytes };
        parts.into_iter().map(part).collect()
    }
}
