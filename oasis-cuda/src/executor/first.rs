//! The first decode step of a request.

use super::CudaExecutor;
use super::options::Residency;
use super::step::{FirstStep, Scope};
use crate::device::DeviceError;
use crate::kernels::{Address, StepInput};
use crate::layout::BLOCK_TOKENS;
use oasis_core::ids::RequestId;
use oasis_core::policy::QuerySource;

impl CudaExecutor {
    /// Runs a request's first decode step, which sees its full KV, and waits for it.
    pub(super) fn run_first(&mut self, id: RequestId, input: StepInput, staged: bool) -> Result<(), DeviceError> {
        if self.parts.host_side.is_some() {
            // The host writes whole lists: what is left of the last step must not be in the same one.
            self.settle()?;
        }
        let request = &self.requests[&id];
        let host = self.host_layers(id, request);
        let row = request.row;
        self.parts.memory.shared.singles()[0] = input;
        if let Some(side) = &self.parts.host_side {
            side.borrow_mut().begin([(row, input.position)]);
        }
        let scope = Scope::First(FirstStep { row, fetch: host.filter(|_| !staged) });
        self.parts.queue_step(scope)?;
        let completes = (input.position as usize + 1).is_multiple_of(BLOCK_TOKENS);
        if let (Some(host), true, false) = (host, completes, self.waits_for_selection()) {
            self.queue_completed(input.position as usize / BLOCK_TOKENS, host.address, host.stride)?;
        }
        self.parts.streams.foreground.synchronize()
    }

    fn waits_for_selection(&self) -> bool {
        matches!(&self.parts.options.residency, Residency::Sparse(sparse) if sparse.source == QuerySource::Exact)
    }

    /// Writes the block that a first step has completed to the host: its selection put it where the full KV lies.
    fn queue_completed(&self, block: usize, host: Address, stride: usize) -> Result<(), DeviceError> {
        let Some(sparse) = &self.parts.memory.sparse else { return Ok(()) };
        let bytes = self.info.geometry.block_bytes();
        for layer in 0..self.parts.layers() {
            let to = host.offset(layer * stride + block * bytes);
            let from = self.parts.staging(sparse, layer).offset(block * bytes);
            for (at, part) in self.parts.host_parts(to, bytes) {
                // SAFETY: the block is reserved; the entries were written by the step before on the same stream.
                unsafe { self.parts.streams.foreground.copy(to.offset(at), from.offset(at), part)? };
            }
        }
        Ok(())
    }
}
