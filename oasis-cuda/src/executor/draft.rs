//! The draft head of a step.

use super::layer::{HeadShape, KvPlace};
use super::parts::Parts;
use super::sampling::Choice;
use super::scope::Scope;
use crate::device::DeviceError;
use crate::gemm::Output;
use crate::kernels::{Address, AttentionParams, EmbedParams};

impl Parts {
    /// The draft head's guess of the token after the given one, for every row of the scope.
    pub fn queue_draft(&self, scope: Scope) -> Result<(), DeviceError> {
        let (Some(head), Some(draft), Some(programs)) = (&self.model.head, &self.memory.draft, &self.programs.draft)
        else {
            return Ok(());
        };
        let (work, spec, schedule) = (self.foreground(), &head.spec, self.schedule(scope));
        let (requests, row) = (scope.requests(), scope.first_row());
        let activations = &draft.activations;
        let (rows, hidden) = ((requests, activations.rows), spec.hidden);
        // The residual is fc(taps); its norm and the embedding's stand side by side.
        let taps = draft.taps.address().offset(row * 3 * spec.target_hidden * 2);
        let residual = activations.residual.address();
        let room = if scope.is_first() { 1 } else { self.memory.rows };
        self.linear(&work, (requests, room), &head.fc, taps, residual, Output::Bf16)?;
        let embedded = activations.added.address();
        let params = EmbedParams {
            table: head.embed.as_ref().unwrap_or(&self.model.embed).address(),
            tokens: schedule.token(),
            draft_tokens: Address::NONE,
            target_ids: Address::NONE,
            out: embedded,
            hidden: hidden as i32,
        };
        // SAFETY: activations are sized for all rows.
        unsafe { programs.embed.launch(work.stream, (requests as u32, 1), &params)? };
        self.join_halves(&work, programs, requests, embedded, residual, activations.normed.address(), head)?;
        let shape = HeadShape { q_heads: spec.q_heads, kv_heads: spec.kv_heads };
        let pages = self.page_row(row);
        let place = KvPlace {
            append_to: draft.entries.address(),
            pages,
            summaries: Address::NONE,
            entries: draft.entries.address(),
            tail: Address::NONE,
            slots: self.extent.blocks,
        };
        let (positions, q) = ((schedule.draft_position(), head.rotation.address()), activations.q.address());
        let attention = &head.attention;
        self.project(&work, requests, activations, attention)?;
        self.append(
            &work,
            &programs.layer,
            &shape,
            attention,
            activations,
            requests,
            positions,
            &place,
            q,
            spec.norm_eps,
        )?;
        let params = AttentionParams {
            q: activations.q.address(),
            entries: place.entries,
            pages,
            tail: Address::NONE,
            start: schedule.draft_entry_start(),
            position: schedule.draft_position(),
            out: activations.attended.address(),
            partial: activations.partial.address(),
            arrived: activations.arrived.address(),
            requests: requests as i32,
            kv_heads: spec.kv_heads as i32,
            slots: self.extent.blocks as i32,
            scale: programs.layer.attention_shape.scale(),
        };
        let grid = (2 * self.device.facts.multiprocessors, 1);
        // SAFETY: the head's pages hold one entry a block of every row's window up to its position.
        unsafe { programs.layer.attention.launch(work.stream, grid, &params)? };
        let added = activations.added.address();
        let layer = &programs.layer;
        self.linear(&work, rows, &head.attention.o, activations.attended.address(), added, Output::Bf16)?;
        self.norm(&work, layer, activations, requests, added, &head.post_attention_norm, spec.norm_eps)?;
        self.mlp(&work, activations, requests, &head.mlp)?;
        self.norm(&work, layer, activations, requests, added, &head.norm, spec.norm_eps)?;
        let (x, y) = (activations.normed.address(), activations.logits.address());
        self.linear(&work, rows, &head.lm_head, x, y, Output::F32)?;
        let choice = Choice {
            memory: &activations.sampler,
            rows: requests,
            first: None,
            logits: y,
            vocab: spec.draft_vocab,
            position: schedule.draft_position(),
            token: draft.tokens.address(),
        };
        self.choose(&work, &choice)
    }
}
