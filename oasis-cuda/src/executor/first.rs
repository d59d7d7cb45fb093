//! The first decode step of a request.

use super::CudaExecutor;
use super::scope::{FirstStep, HostLayers, Scope};
use super::staging::Places;
use crate::device::{DeviceError, Range};
use crate::kernels::StepInput;
use crate::layout::{BLOCK_TOKENS, entry_bytes};
use oasis_core::ids::RequestId;

impl CudaExecutor {
    /// Runs a request's first decode step, which sees its full KV, and waits for it.
    pub(super) fn run_first(&mut self, id: RequestId, input: StepInput) -> Result<(), DeviceError> {
        let _range = Range::begin(format_args!("first step of request {id}"));
        let staged = self.staged == Some(id);
        if !staged {
            // What is fetched takes the place of another request's full KV, or of what a prefill is writing.
            self.staged = None;
            self.parts.prefill().stream.synchronize()?;
            self.parts.streams.offload.synchronize()?;
        }
        if self.parts.host_side.is_some() || self.parts.store_link.is_some() {
            // The host writes whole lists, and reads a store's back: what is left of the last step must not be in the same
            // one as this step's, which the device carries out by itself.
            self.settle()?;
        }
        let request = &self.requests[&id];
        let host = self.host_layers(id, request);
        let row = request.row;
        self.parts.memory.shared.singles()[0] = input;
        if let Some(side) = &self.parts.host_side {
            side.borrow_mut().rows.begin(true, [(row, input.position as usize)]);
        }
        let places = self.parts.memory.sparse.as_ref().map(|sparse| sparse.staging.places);
        let kept = places.filter(|_| staged).map_or(0, Places::kept);
        let scope = Scope::First(FirstStep { row, kept, fetch: host.filter(|_| kept < self.parts.layers()) });
        self.parts.queue_step(scope)?;
        let completes = (input.position as usize + 1).is_multiple_of(BLOCK_TOKENS);
        if let (Some(host), true, false) = (host, completes, self.parts.chooses_first()) {
            let block = input.position as usize / BLOCK_TOKENS;
            match self.parts.store_link {
                Some(_) => self.parts.store_tails(id, row, block)?,
                None => self.queue_completed(row, block, host)?,
            }
        }
        self.parts.streams.foreground.synchronize()
    }

    /// Writes the block that a first step has completed to the host: its selection put it where the full KV lies on the
    /// device, which a later layer may have taken by now, but the tail still has it.
    fn queue_completed(&self, row: usize, block: usize, host: HostLayers) -> Result<(), DeviceError> {
        let Some(sparse) = &self.parts.memory.sparse else { return Ok(()) };
        let (kv_heads, entry) = (self.info.geometry.kv_heads, entry_bytes(self.info.geometry.head_dim));
        for (layer, sets) in sparse.layers.iter().enumerate() {
            for head in 0..kv_heads {
                let to = host.address.offset(layer * host.stride + (block * kv_heads + head) * entry);
                let from = sets.tail.address().offset(((row * kv_heads + head) * 2 + block % 2) * entry);
                for (at, part) in self.parts.host_parts(to, entry) {
                    // SAFETY: the block is reserved; the entry was written by the step before on the same stream.
                    unsafe { self.parts.streams.foreground.copy(to.offset(at), from.offset(at), part)? };
                }
            }
        }
        Ok(())
    }
}
