//! Looking at an executor from outside, for checks.

use super::CudaExecutor;
use super::options::Bridge;
use super::request::Phase;
use crate::device::DeviceError;
use crate::layout::BLOCK_TOKENS;
use anyhow::Context;
use oasis_core::executor::Logits;
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::observer::StepObserver;
use oasis_core::policy::LinkRate;

/// What a layer's selection of one request worked on and what it left.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// `[kv_heads][blocks]`: scores of the complete blocks that the last step ranked.
    pub scores: Vec<Vec<f32>>,
    /// `[kv_heads][slots]`: block in each slot, negative where it is free.
    pub blocks: Vec<Vec<i32>>,
    /// `[kv_heads][slots]`: step that last wanted it; means nothing where the slot is free.
    pub last_selected: Vec<Vec<u32>>,
    /// The last step, as the device counts them.
    pub step: u32,
}

impl CudaExecutor {
    /// Logits behind a request's last token, f32 `[vocab]`; `None` when there is no such request. They are overwritten
    /// by whatever runs next: the prefill of another prompt, or another request's first decode step.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn logits(&self, request: RequestId) -> Result<Option<Vec<f32>>, DeviceError> {
        let Some(request) = self.requests.get(&request) else { return Ok(None) };
        let (memory, vocab) = (&self.parts.memory, self.info.vocab);
        let decoded = request.position - request.prompt;
        match decoded {
            0 => memory.prefill.logits.read(),
            // A first decode step runs alone, as row 0.
            1 if self.info.budget_blocks.is_some() => memory.activations.logits.read_at(0, vocab),
            _ => memory.activations.logits.read_at(request.row * vocab, vocab),
        }
        .map(Some)
    }

    /// The draft head's guess in a request's last decode step: the token after the one that the step ran. `None` before
    /// that, and where no draft head is used. It is overwritten by whatever step runs next.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn draft_guess(&self, request: RequestId) -> Result<Option<TokenId>, DeviceError> {
        let request = self.requests.get(&request).filter(|request| request.phase == Phase::Decode);
        let (Some(request), Some(draft), Some(head)) = (request, &self.parts.memory.draft, &self.parts.model.head)
        else {
            return Ok(None);
        };
        // A first decode step runs alone, as row 0.
        let row = if request.position - request.prompt == 1 { 0 } else { request.row };
        let id = draft.tokens.read_at(row, 1)?[0];
        let token = match (&head.target_ids, usize::try_from(id)) {
            (Some(ids), Ok(id)) if id < ids.len() => ids.read_at(id, 1)?[0],
            _ => id,
        };
        Ok(u32::try_from(token).ok().map(TokenId))
    }

    /// Sets or removes the observer of decode steps, which sees prompts that are read from now on. Layers are shown when
    /// the host has their facts: before a step's attention where the step chooses before it, after its attention
    /// otherwise; entries are not shown.
    ///
    /// # Errors
    /// When the host does not run all policies: [`SparseOptions::observed`](super::SparseOptions::observed).
    pub fn set_observer(&mut self, observer: Option<Box<dyn StepObserver>>) -> Result<(), DeviceError> {
        match &self.parts.host_side {
            Some(side) if side.borrow().rows.bridge == Bridge::Prediction => {
                side.borrow_mut().rows.set_observer(observer);
                Ok(())
            }
            _ if observer.is_none() => Ok(()),
            _ => {
                let problem = "expected an executor whose policies the host runs, found";
                let error = DeviceError::new("observing decode steps", format!("{problem} {}", self.info.device));
                Err(error.hint("start it with SparseOptions::observed"))
            }
        }
    }

    /// The cap of the last step and how fast the link has been since the start, where the cap follows it.
    pub fn link_cap(&self) -> Option<(usize, Option<LinkRate>)> {
        self.parts.link_follower.as_ref().map(|link| link.borrow().last())
    }

    /// The state of a layer's selection after a request's last decode step; `None` in dense decoding and before it.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn selection(&self, request: RequestId, layer: usize) -> Result<Option<Selection>, DeviceError> {
        let request = self.requests.get(&request).filter(|request| request.phase == Phase::Decode);
        let (Some(request), Some(sparse)) = (request, &self.parts.memory.sparse) else { return Ok(None) };
        let (sets, kv_heads) = (&sparse.layers[layer], self.info.geometry.kv_heads);
        let (slots, stride) = (self.parts.extent.slots, self.parts.extent.tiles * BLOCK_TOKENS);
        let pairs = request.row * kv_heads..(request.row + 1) * kv_heads;
        let lag = usize::from(self.parts.chooses_first());
        let ranked = (request.position - lag) / BLOCK_TOKENS;
        Ok(Some(Selection {
            scores: pairs.clone().map(|pair| sets.scores.read_at(pair * stride, ranked)).collect::<Result<_, _>>()?,
            blocks: pairs.clone().map(|pair| sets.slot_block.read_at(pair * slots, slots)).collect::<Result<_, _>>()?,
            last_selected: pairs.map(|p| sets.last_selected.read_at(p * slots, slots)).collect::<Result<_, _>>()?,
            step: self.parts.memory.step.read()?[0],
        }))
    }
}

impl Logits for CudaExecutor {
    fn last_logits(&self, request: RequestId) -> anyhow::Result<Vec<f32>> {
        self.logits(request)?.with_context(|| format!("request {request}: expected one that has logits, found none"))
    }
}
