//! Reading a prompt, a few layers ahead of the device.

use super::CudaExecutor;
use super::decoding::token_of;
use super::plan::LAYERS_AHEAD;
use super::prefill::Prompt;
use super::request::{Phase, Request};
use super::scope::HostLayers;
use crate::device::DeviceError;
use oasis_core::executor::PrefillProgress;
use oasis_core::geometry::KvFootprint;
use oasis_core::ids::RequestId;

impl CudaExecutor {
    pub(super) fn try_prefill(&mut self, id: RequestId) -> Result<PrefillProgress, PrefillError> {
        let refuse = |problem: &str| Err(PrefillError::Request(format!("request {id}: {problem}")));
        let busy = self.requests.values().any(|r| r.phase == Phase::Decode);
        let Some(request) = self.requests.get(&id) else { return refuse("expected an admitted request, found none") };
        let (queued, tokens) = match &request.phase {
            Phase::Prefill { queued, prompt } => (queued, prompt),
            Phase::Expected => return refuse("its prompt is read elsewhere"),
            _ => return refuse("its prompt has been read already"),
        };
        let (mut queued, layers) = (*queued, self.parts.layers());
        let other = |r: &Request| r.row != request.row && matches!(r.phase, Phase::Prefill { queued: 1.., .. });
        if self.requests.values().any(other) {
            return refuse("expected one prompt to be read at a time, found another under way");
        }
        let host = self.host_layers(id, request);
        let prompt = Prompt { row: request.row, tokens: request.prompt, host };
        if queued == 0 {
            let tokens: Vec<i32> = tokens.iter().map(|token| token.0 as i32).collect();
            self.begin_prompt(id, prompt, &tokens)?;
        }
        let mut done = self.layers_done(queued)?;
        self.store_layers(id, host, done)?;
        let free = self.rows.iter().filter(|row| row.is_none()).count();
        self.parts.share_with_decode(busy && is_nearly_full(free, self.rows.len()))?;
        while queued < layers && queued < done + LAYERS_AHEAD {
            self.parts.queue_prompt_layer(prompt, queued)?;
            queued += 1;
        }
        if !busy && done < queued {
            // Nothing else to do meanwhile.
            self.parts.events.prefilled[done].synchronize()?;
            done = self.layers_done(queued)?;
            self.store_layers(id, host, done)?;
        }
        let request = self.requests.get_mut(&id).expect("looked up above");
        if done < layers {
            if let Phase::Prefill { queued: before, .. } = &mut request.phase {
                *before = queued;
            }
            let tokens = request.prompt;
            return Ok(PrefillProgress::Running { done: done * tokens, total: layers * tokens });
        }
        // What the host holds is complete before a step may evict it.
        self.parts.streams.offload.synchronize()?;
        self.parts.end_planning();
        let token = self.parts.memory.shared.outputs()[request.row];
        let prefill = std::mem::take(&mut request.footprint.prefill);
        self.device_bytes -= KvFootprint { prefill, ..KvFootprint::default() };
        request.phase = match self.info.budget_blocks {
            Some(_) => Phase::First,
            None => Phase::Decode,
        };
        token_of(id, token).map(PrefillProgress::Done).map_err(|error| PrefillError::Request(error.to_string()))
    }

    /// Puts the layers of a prompt that are done into the store, where that is not memory which the device writes itself.
    fn store_layers(&self, id: RequestId, host: Option<HostLayers>, done: usize) -> Result<(), PrefillError> {
        let (Some(link), Some(host)) = (&self.parts.store_link, host) else { return Ok(()) };
        let mut link = link.borrow_mut();
        let blocks = host.bytes / self.info.geometry.block_bytes();
        for layer in link.stored()..done {
            self.parts.events.copied[layer].synchronize()?;
            let stored = link.store_layer(id, blocks);
            stored.map_err(|error| PrefillError::Request(format!("request {id}: {error}")))?;
        }
        Ok(())
    }

    /// Layers of the prefill under way that are done.
    pub(super) fn layers_done(&self, queued: usize) -> Result<usize, DeviceError> {
        for layer in 0..queued {
            if !self.parts.events.prefilled[layer].is_done()? {
                return Ok(layer);
            }
        }
        Ok(queued)
    }

    pub(super) fn begin_prompt(&mut self, id: RequestId, prompt: Prompt, tokens: &[i32]) -> Result<(), DeviceError> {
        if let Some(link) = &self.parts.store_link {
            link.borrow_mut().begin_prompt();
        }
        // Another that has not decoded yet loses its full KV on the device: it is fetched back later.
        self.staged = Some(id);
        let shared = &mut self.parts.memory.shared;
        shared.prompt()[..tokens.len()].copy_from_slice(tokens);
        shared.singles()[1].position = tokens.len() as i32 - 1;
        // The row's tables are set on the foreground's stream.
        self.parts.order(&self.parts.streams.foreground, self.parts.prefill().stream)?;
        self.parts.queue_prompt(prompt)
    }
}

/// Whether so few rows are free that prefills keep up with the requests that end. While more are, what is read next is what
/// limits, and a prefill takes all multiprocessors.
fn is_nearly_full(free: usize, rows: usize) -> bool {
    free <= rows / 32
}

/// Why a prefill cannot go on.
pub(super) enum PrefillError {
    Request(String),
    Device(DeviceError),
}

impl From<DeviceError> for PrefillError {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefill_shares_while_at_most_one_row_in_32_is_free() {
        let shares = |rows: usize| (0..=rows).take_while(|free| is_nearly_full(*free, rows)).count();
        assert_eq!([1, 16, 31, 32, 128].map(shares), [1, 1, 1, 2, 5]);
        assert!(!is_nearly_full(6, 128) && !is_nearly_full(16, 16));
    }
}
