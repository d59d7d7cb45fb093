//! Requests that begin in the middle, for measurements: KV of random numbers instead of a prompt that was read.

use super::CudaExecutor;
use super::options::Residency;
use super::request::Phase;
use crate::device::{DeviceError, Kernel};
use crate::kernels::{Address, RandomWeights, RandomWeightsParams};
use crate::layout::{BLOCK_TOKENS, entry_bytes};
use oasis_core::executor::{Admission, Executor, Sequence};
use oasis_core::ids::RequestId;
use serde::Serialize;

/// Bytes that a decode step reads from device memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct StepBytes {
    /// Weights, the draft head's included; of experts, those that the last step's rows were routed to.
    pub weights: u64,
    /// Resident entries and tails.
    pub kv: u64,
    /// Summaries.
    pub summaries: u64,
    /// KV of the draft head.
    pub draft: u64,
}

impl StepBytes {
    /// Sum of all parts.
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.summaries + self.draft
    }
}

impl CudaExecutor {
    /// Fills everything that holds KV, on the device and in host memory, with random numbers.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn fill_with_noise(&mut self, seed: u64) -> Result<(), DeviceError> {
        let kernel = self.parts.device.load(&self.parts.device.compiler()?, &RandomWeights)?;
        // Bytes that are numbers in e4m3, too, as summaries may be: with this bit clear none is NaN.
        const NUMBERS: u32 = 0xbfbf_bfbf;
        let mut ranges: Vec<(Address, usize, u32)> = Vec::new();
        let memory = &self.parts.memory;
        for buffer in &memory.dense {
            ranges.push((buffer.address(), buffer.bytes(), u32::MAX));
        }
        if let Some(sparse) = &memory.sparse {
            for sets in &sparse.layers {
                for (buffer, mask) in [(&sets.slots, u32::MAX), (&sets.tail, u32::MAX), (&sets.summaries, NUMBERS)] {
                    ranges.push((buffer.address(), buffer.bytes(), mask));
                }
            }
        }
        if let Some(draft) = &memory.draft {
            ranges.push((draft.entries.address(), draft.entries.bytes(), u32::MAX));
            ranges.push((draft.taps.address(), draft.taps.bytes(), u32::MAX));
        }
        if let Some(host) = &mut self.parts.host {
            let bytes = host.bytes_mut();
            ranges.push((Address(bytes.as_ptr() as u64), bytes.len(), u32::MAX));
        }
        for (index, (data, bytes, mask)) in ranges.into_iter().enumerate() {
            let seed = seed.wrapping_add((index as u64) << 44);
            self.noise(&kernel, RandomWeightsParams { data, pairs: (bytes / 4) as u64, seed, width: 1.0, mask })?;
        }
        self.parts.device.synchronize()
    }

    fn noise(&self, kernel: &Kernel<RandomWeights>, params: RandomWeightsParams) -> Result<(), DeviceError> {
        let ctas = 4 * self.parts.device.facts.multiprocessors;
        // SAFETY: the range is device memory or mapped host memory of this executor, and nothing runs.
        unsafe { kernel.launch(&self.parts.streams.foreground, (ctas, 1), &params) }
    }

    /// Admits a request that stands after its prompt, with whatever its memory holds as KV and a full working set. What
    /// it decodes means nothing; what it costs is what a real one costs.
    ///
    /// # Errors
    /// As [`Executor::admit`].
    pub fn admit_in_the_middle(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        let id = sequence.request;
        let admission = self.admit(sequence)?;
        if admission == Admission::Admitted {
            self.occupy(id)?;
        }
        Ok(admission)
    }

    /// Changes the most admissions a KV head and step; graphs are captured anew. A selector that the host runs keeps its
    /// own, as does one that follows the link; and where KV goes through a store the cap stays within that of the start, which there is pinned memory for.
    pub fn set_cap(&mut self, cap: usize) {
        if self.parts.host_side.is_some() || self.parts.link_follower.is_some() {
            return;
        }
        let cap = self.parts.store_link.as_ref().map_or(cap, |link| cap.min(link.borrow().most()));
        if let Residency::Sparse(sparse) = &mut self.parts.options.residency {
            sparse.cap = cap;
            self.info.cap = cap;
            self.graphs.clear();
        }
    }

    /// Bytes of device memory that a step of all decoding requests must read at least, each once; the experts are those
    /// of the last step, as the device routed them.
    pub fn step_bytes(&self) -> StepBytes {
        let spec = &self.parts.model.spec;
        let draft = self.parts.memory.draft.is_some();
        let entry = entry_bytes(spec.head_dim) as u64;
        let heads = (spec.layers * spec.kv_heads) as u64;
        let experts = self.parts.memory.experts.as_ref();
        let active = experts.and_then(|experts| experts.active().ok()).unwrap_or(0);
        let mut bytes = StepBytes { weights: self.parts.model.step_bytes(draft, active), ..StepBytes::default() };
        for request in self.requests.values().filter(|request| request.phase == Phase::Decode) {
            let blocks = request.position / BLOCK_TOKENS;
            bytes.kv += heads * (blocks.min(self.parts.extent.slots) + 1) as u64 * entry;
            if let Residency::Sparse(sparse) = &self.parts.options.residency {
                bytes.summaries += heads * blocks as u64 * sparse.device_summary() as u64;
            }
            if let Some(head) = self.parts.model.head.as_ref().filter(|_| draft) {
                let head_entry = entry_bytes(head.spec.head_dim) as u64;
                let attended = (blocks + 1).min(self.parts.extent.draft_blocks);
                bytes.draft += (head.spec.kv_heads * attended) as u64 * head_entry;
            }
        }
        bytes
    }

    /// Says of every slot of a request that it holds a block.
    fn occupy(&mut self, id: RequestId) -> Result<(), DeviceError> {
        let request = self.requests.get_mut(&id).expect("just admitted");
        request.phase = Phase::Decode;
        let (row, prompt) = (request.row, request.prompt);
        let prefill = std::mem::take(&mut request.footprint.prefill);
        self.device_bytes.prefill -= prefill;
        let Residency::Sparse(_) = &self.parts.options.residency else { return Ok(()) };
        let (slots, kv_heads) = (self.parts.extent.slots, self.info.geometry.kv_heads);
        // Spread over the context, a free slot for each block that there is not.
        let blocks = self.info.geometry.full_blocks(prompt);
        let spread = |slot: usize| match slots < blocks {
            true => (slot * blocks / slots) as i32,
            false if slot < blocks => slot as i32,
            false => -1,
        };
        let table: Vec<i32> = (0..kv_heads).flat_map(|_| (0..slots).map(spread)).collect();
        self.parts.streams.foreground.synchronize()?;
        if let Some(side) = &self.parts.host_side {
            side.borrow_mut().rows.occupy(row, &table);
        }
        let Some(sparse) = &mut self.parts.memory.sparse else { return Ok(()) };
        for sets in &mut sparse.layers {
            sets.slot_block.write_at(row * kv_heads * slots, &table)?;
        }
        Ok(())
    }
}
