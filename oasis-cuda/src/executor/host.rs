//! Host memory for the full KV of requests: pinned, mapped, one run a request.

use crate::device::{Device, DeviceError, PinnedBuffer};
use crate::kernels::Address;
use oasis_core::ids::RequestId;
use oasis_core::memory::{Reservation, StoreUsage};
use std::collections::BTreeMap;

/// Pinned memory that requests take runs of. Runs of one size after the other: first fit.
pub(super) struct HostPool {
    memory: PinnedBuffer,
    /// Start and length of every run in use, by request; aliased runs overlap.
    runs: BTreeMap<RequestId, Run>,
    alias: Option<usize>,
    /// Requests taken so far: which image the next one shares.
    taken: usize,
}

/// A request's memory: `[layers][blocks][kv_heads]` entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub start: u64,
    pub bytes: u64,
}

impl HostPool {
    pub fn new(
        device: &Device,
        bytes: u64,
        alias: Option<usize>,
        progress: &(dyn Fn(usize) + Sync),
    ) -> Result<Self, DeviceError> {
        let memory = device.pinned(bytes as usize, progress)?;
        Ok(Self { memory, runs: BTreeMap::new(), alias, taken: 0 })
    }

    /// A run of `bytes` for a request that has none.
    pub fn reserve(&mut self, request: RequestId, bytes: u64) -> Reservation {
        let capacity = self.memory.as_slice().len() as u64;
        if bytes > capacity {
            return Reservation::TooLarge { needed: bytes, capacity };
        }
        let start = match self.alias {
            // Images at equal distances: requests of any size fit where the largest does.
            Some(images) => {
                let pitch = (capacity - bytes) / images.max(1) as u64 / 4096 * 4096;
                Some((self.taken % images.max(1)) as u64 * pitch)
            }
            None => self.first_fit(bytes),
        };
        match start {
            Some(start) => {
                self.taken += 1;
                self.runs.insert(request, Run { start, bytes });
                Reservation::Granted
            }
            None => Reservation::Full { needed: bytes, free: capacity - self.reserved() },
        }
    }

    fn first_fit(&self, bytes: u64) -> Option<u64> {
        let mut used: Vec<Run> = self.runs.values().copied().collect();
        used.sort_unstable_by_key(|run| run.start);
        let mut start = 0;
        for run in used {
            if run.start >= start + bytes {
                break;
            }
            start = (run.start + run.bytes).next_multiple_of(4096);
        }
        (start + bytes <= self.memory.as_slice().len() as u64).then_some(start)
    }

    /// Where a request's run begins.
    pub fn address(&self, request: RequestId) -> Option<Address> {
        self.runs.get(&request).map(|run| self.memory.address().offset(run.start as usize))
    }

    /// Parts of `bytes` at `address` that a copy engine takes one at a time: offset and length.
    pub fn copies(&self, address: Address, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
        self.memory.parts(self.offset(address), bytes)
    }

    /// Whether `address` is in this memory.
    pub fn contains(&self, address: Address) -> bool {
        (self.memory.address().0..self.memory.address().offset(self.memory.as_slice().len()).0).contains(&address.0)
    }

    /// The bytes at `address`.
    pub fn bytes_at(&self, address: Address, bytes: usize) -> &[u8] {
        &self.memory.as_slice()[self.offset(address)..][..bytes]
    }

    fn offset(&self, address: Address) -> usize {
        (address.0 - self.memory.address().0) as usize
    }

    pub fn release(&mut self, request: RequestId) {
        self.runs.remove(&request);
    }

    fn reserved(&self) -> u64 {
        self.runs.values().map(|run| run.bytes).sum()
    }

    pub fn usage(&self) -> StoreUsage {
        let reserved = self.reserved();
        let capacity = self.memory.as_slice().len() as u64;
        StoreUsage { capacity, reserved, used: reserved.min(capacity), requests: self.runs.len() }
    }

    /// The memory itself, to be filled before a measurement.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }
}
