//! Prefill, layer by layer: the whole prompt passes a layer before the next one begins. The device holds the full KV of
//! a few layers only, while those before are on their way to the host. Of the last layer only keys, values and the last
//! token's output survive, so nothing else is computed.

use super::experts::Routed;
use super::parts::{Parts, Work};
use super::plan::geometry;
use super::sampling::Choice;
use super::scope::HostLayers;
use crate::device::{DeviceError, HeadRows, Range};
use crate::gemm::{GemmShape, Output};
use crate::kernels::{AddNormParams, Address, AppendPromptParams, EmbedParams};
use crate::layout::{BLOCK_TOKENS, entry_bytes};
use crate::model::{DeviceAttention, DeviceLayer, DeviceVector, FeedForward};
use std::ops;

/// A prompt that is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prompt {
    pub row: usize,
    pub tokens: usize,
    /// Where its full KV goes; `None` in dense decoding.
    pub host: Option<HostLayers>,
}

/// Tokens that pass a product together: those asked for, and the rows that are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunk {
    start: usize,
    tokens: usize,
    rows: usize,
}

/// Chunks of some tokens. The last one is rounded up to one of few sizes, so that products need few plans.
fn chunks(tokens: ops::Range<usize>, chunk: usize) -> impl Iterator<Item = Chunk> {
    tokens.clone().step_by(chunk).map(move |start| {
        let tokens = (tokens.end - start).min(chunk);
        Chunk { start, tokens, rows: tokens.next_power_of_two().clamp(16.min(chunk), chunk) }
    })
}

impl Parts {
    /// Queues the start of a prompt, whose tokens lie in the shared memory.
    pub fn queue_prompt(&self, prompt: Prompt) -> Result<(), DeviceError> {
        let (work, memory) = (self.prefill(), &self.memory.prefill);
        // SAFETY: both sides have room for the prompt; the host leaves it alone until the prefill is through.
        unsafe {
            work.stream.copy(memory.prompt.address(), self.memory.shared.prompt_address(), prompt.tokens * 4)?;
        }
        let spec = &self.model.spec;
        self.embed_prompt(
            &self.model.embed,
            memory.prompt.address(),
            prompt.tokens,
            memory.residual.address(),
            spec.hidden,
        )?;
        if self.memory.draft.is_some() {
            let input = &memory.head_input;
            // SAFETY: the buffer is this prefill's own.
            unsafe { work.stream.fill(input.address(), 0, input.bytes())? };
        }
        Ok(())
    }

    fn embed_prompt(
        &self,
        table: &crate::model::DeviceMatrix,
        tokens: Address,
        rows: usize,
        out: Address,
        hidden: usize,
    ) -> Result<(), DeviceError> {
        let params = EmbedParams {
            table: table.address(),
            tokens,
            draft_tokens: Address::NONE,
            target_ids: Address::NONE,
            out,
            hidden: hidden as i32,
        };
        // SAFETY: tokens were checked against the vocabulary; callers give room for `rows` rows.
        unsafe { self.programs.embed_prompt.launch(self.prefill().stream, (rows as u32, 1), &params) }
    }

    /// Queues one layer; after the last one the draft head's cache and the first token too.
    pub fn queue_prompt_layer(&self, prompt: Prompt, index: usize) -> Result<(), DeviceError> {
        let _range = Range::begin(format_args!("prefill layer {index}"));
        let (work, memory, spec) = (self.prefill(), &self.memory.prefill, &self.model.spec);
        let layer = &self.model.layers[index];
        self.collect_taps(prompt, index)?;
        let (q_heads, heads) = (spec.q_heads, spec.q_heads + 2 * spec.kv_heads);
        let (is_last, all) = (index + 1 == self.layers(), 0..prompt.tokens);
        let (outputs, first_head) =
            if is_last { (prompt.tokens - 1..prompt.tokens, q_heads) } else { (all.clone(), 0) };
        for chunk in chunks(all, memory.chunk) {
            self.project_prompt(chunk, layer, first_head..heads)?;
        }
        if is_last {
            for chunk in chunks(outputs.clone(), memory.chunk) {
                self.project_prompt(chunk, layer, 0..q_heads)?;
            }
        }
        self.append_prompt_layer(prompt, index, outputs.start)?;
        self.attend_prompt(prompt, outputs.clone())?;
        for chunk in chunks(outputs, memory.chunk) {
            let rows = (chunk.rows, chunk.rows);
            let residual = memory.residual.address().offset(chunk.start * spec.hidden * 2);
            let attended = memory.attended.address().offset(chunk.start * spec.q_heads * spec.head_dim * 2);
            let normed = memory.normed.address();
            self.linear_onto(&work, rows, &layer.attention.o, attended, residual)?;
            self.norm_rows(chunk.tokens, residual, &layer.post_attention_norm, normed, spec.norm_eps)?;
            self.prompt_feed_forward(&work, chunk, index, residual)?;
        }
        if is_last {
            self.queue_draft_cache(prompt)?;
            self.queue_first_token(prompt)?;
        }
        work.stream.record(&self.events.prefilled[index])
    }

    /// Norms of a chunk, and their products with some of the layer's heads of Q, K and V.
    fn project_prompt(&self, chunk: Chunk, layer: &DeviceLayer, heads: ops::Range<usize>) -> Result<(), DeviceError> {
        let (memory, spec) = (&self.memory.prefill, &self.model.spec);
        let attention = &layer.attention;
        let residual = memory.residual.address().offset(chunk.start * spec.hidden * 2);
        let qkv = memory.qkv.address().offset(chunk.start * attention.qkv.rows * 2);
        let normed = memory.normed.address();
        self.norm_rows(chunk.tokens, residual, &layer.input_norm, normed, spec.norm_eps)?;
        self.project_heads(&self.prefill(), chunk.rows, attention, spec.head_dim, heads, normed, qkv)
    }

    /// Feed-forward part of a chunk, from its norms onto the residual.
    fn prompt_feed_forward(
        &self,
        work: &Work<'_>,
        chunk: Chunk,
        layer: usize,
        residual: Address,
    ) -> Result<(), DeviceError> {
        let memory = &self.memory.prefill;
        let (rows, normed) = ((chunk.rows, chunk.rows), memory.normed.address());
        match &self.model.layers[layer].mlp {
            FeedForward::Dense(mlp) => {
                let (gate_up, inner) = (memory.gate_up.address(), memory.inner.address());
                self.linear(work, rows, &mlp.gate_up, normed, gate_up, Output::Bf16)?;
                self.swiglu(work, chunk.tokens, mlp.down.cols, gate_up, inner)?;
                self.linear_onto(work, rows, &mlp.down, inner, residual)
            }
            FeedForward::Experts(experts) => {
                let routed = Routed {
                    memory: memory.experts.as_ref().expect("a model with experts has memory for them"),
                    layer,
                    rows: chunk.tokens,
                    product: rows,
                    position: Address::NONE,
                    queries: 1,
                    x: normed,
                    base: residual,
                    out: residual,
                };
                self.mixture(work, experts, &routed)
            }
        }
    }

    fn norm_rows(
        &self,
        rows: usize,
        residual: Address,
        weight: &DeviceVector,
        out: Address,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let hidden = weight.len() as i32;
        let weight = weight.address();
        let params = AddNormParams { residual, x: Address::NONE, weight, out, hidden, out_stride: hidden, eps };
        // SAFETY: callers give room for `rows` rows on both sides.
        unsafe { self.programs.layer.norm.launch(self.prefill().stream, (rows as u32, 1), &params) }
    }

    /// Positions of which the draft head needs keys and values: those of its window whose next token is known. They begin
    /// with a block.
    fn draft_positions(&self, prompt: Prompt) -> ops::Range<usize> {
        let known = prompt.tokens - 1;
        // No more blocks than pages: those of one launch are written in any order.
        geometry(&self.model.spec).window_start(known, Some(self.extent.draft_blocks))..known
    }

    /// Adds what the head takes of this layer's input, in its window: the products with the parts of `fc` are summed, so
    /// that no hidden state is kept but that of the last token.
    fn collect_taps(&self, prompt: Prompt, index: usize) -> Result<(), DeviceError> {
        let (Some(head), Some(draft)) = (&self.model.head, &self.memory.draft) else { return Ok(()) };
        let (work, memory, hidden) = (self.prefill(), &self.memory.prefill, self.model.spec.hidden);
        let known = self.draft_positions(prompt);
        for (tap, _) in head.taps.iter().enumerate().filter(|(_, tapped)| **tapped == index) {
            for chunk in chunks(known.clone(), memory.chunk) {
                let shape = GemmShape {
                    accumulate: true,
                    w_stride: 3 * hidden,
                    ..GemmShape::dense(chunk.rows, head.spec.hidden, hidden)
                };
                let x = memory.residual.address().offset(chunk.start * hidden * 2);
                let y = memory.head_input.address().offset((chunk.start - known.start) * head.spec.hidden * 2);
                self.product(&work, shape, head.fc.address().offset(tap * hidden * 2), x, y, Address::NONE)?;
            }
            let last = memory.residual.address().offset((prompt.tokens - 1) * hidden * 2);
            let taps = draft.taps.address().offset((prompt.row * 3 + tap) * hidden * 2);
            // SAFETY: one row on both sides; the taps are those of a row that does not decode yet.
            unsafe { work.stream.copy(taps, last, hidden * 2)? };
        }
        Ok(())
    }

    /// Norms, rotation, entries and summaries of a layer, then the copy of its entries to the host. Queries are those of
    /// the tokens from `first_query` on.
    fn append_prompt_layer(&self, prompt: Prompt, index: usize, first_query: usize) -> Result<(), DeviceError> {
        let (work, memory, spec) = (self.prefill(), &self.memory.prefill, &self.model.spec);
        let entry = entry_bytes(spec.head_dim);
        let attention = &self.model.layers[index].attention;
        let pair = prompt.row * spec.kv_heads;
        let (entries, pages, tail, summaries) = match &self.memory.sparse {
            None => (self.memory.dense[index].address(), self.page_row(prompt.row), Address::NONE, Address::NONE),
            Some(sparse) => {
                if let Some(before) = sparse.staging.places.before(index) {
                    // Its place is used again.
                    work.stream.wait(&self.events.copied[before])?;
                }
                let sets = &sparse.layers[index];
                let tail = sets.tail.address().offset(pair * 2 * entry);
                let summaries = self.summaries(sets, pair);
                (sparse.staging.layer(index), Address::NONE, tail, summaries)
            }
        };
        let params = AppendPromptParams {
            qkv: memory.qkv.address(),
            q_norm: vector(&attention.q_norm),
            k_norm: vector(&attention.k_norm),
            rotation: self.model.rotation.address(),
            entries,
            pages,
            tail,
            summaries,
            tokens: prompt.tokens as i32,
            first_query: first_query as i32,
            q_heads: spec.q_heads as i32,
            kv_heads: spec.kv_heads as i32,
            max_tiles: self.extent.tiles as i32,
            first_block: 0,
            last_block: ((prompt.tokens - 1) / BLOCK_TOKENS) as i32,
            eps: spec.norm_eps,
        };
        let grid = (prompt.tokens.div_ceil(BLOCK_TOKENS) as u32, (spec.q_heads + spec.kv_heads) as u32);
        // SAFETY: entries, tails and summaries have room for the longest context, which the prompt is within.
        unsafe { self.programs.layer.append_prompt.launch(work.stream, grid, &params)? };
        let Some(host) = prompt.host else { return Ok(()) };
        work.stream.record(&self.events.appended[index])?;
        self.streams.offload.wait(&self.events.appended[index])?;
        self.copy_to_bounce(index, entries, host.bytes)?;
        let to = host.address.offset(index * host.stride);
        for (at, bytes) in self.host_parts(to, host.bytes) {
            // SAFETY: the blocks are reserved for this request; the entries are not changed before the copy is done.
            unsafe { self.streams.offload.copy(to.offset(at), entries.offset(at), bytes)? };
        }
        self.streams.offload.record(&self.events.copied[index])
    }

    /// Attention of the prompt's last tokens, `queries`, over all of it.
    fn attend_prompt(&self, prompt: Prompt, queries: ops::Range<usize>) -> Result<(), DeviceError> {
        let (memory, spec) = (&self.memory.prefill, &self.model.spec);
        let heads = spec.q_heads + 2 * spec.kv_heads;
        let all = HeadRows::dense(memory.qkv.address(), prompt.tokens, heads, spec.head_dim);
        let (q, k, v) = (
            all.head_range(0, spec.q_heads).token_range(queries.start, queries.len()),
            all.head_range(spec.q_heads, spec.kv_heads),
            all.head_range(spec.q_heads + spec.kv_heads, spec.kv_heads),
        );
        let out = HeadRows::dense(memory.attended.address(), prompt.tokens, spec.q_heads, spec.head_dim)
            .token_range(queries.start, queries.len());
        let shape = &self.programs.prefill_attention_shape;
        let params = shape.params(&self.device, &q, &k, &v, &out)?;
        let grid = shape.grid(&q);
        // SAFETY: the tensors are this prefill's activations, with room for the whole prompt.
        unsafe { self.programs.prefill_attention.launch(self.prefill().stream, grid, &params) }
    }

    /// Keys and values of the draft head for every position of its window whose next token is known. Nothing else of the
    /// head survives a prefill, so it needs no attention.
    fn queue_draft_cache(&self, prompt: Prompt) -> Result<(), DeviceError> {
        let (Some(head), Some(draft), Some(programs)) = (&self.model.head, &self.memory.draft, &self.programs.draft)
        else {
            return Ok(());
        };
        let (work, memory, spec) = (self.prefill(), &self.memory.prefill, &head.spec);
        let table = head.embed.as_ref().unwrap_or(&self.model.embed);
        let DeviceAttention { q_norm, k_norm, .. } = &head.attention;
        let (known, heads) = (self.draft_positions(prompt), spec.q_heads..spec.q_heads + 2 * spec.kv_heads);
        for chunk in chunks(known.clone(), memory.chunk) {
            let tokens = memory.prompt.address().offset((chunk.start + 1) * 4);
            let (embedded, normed, product) = (memory.gate_up.address(), memory.normed.address(), memory.qkv.address());
            self.embed_prompt(table, tokens, chunk.tokens, embedded, spec.hidden)?;
            let residual = memory.head_input.address().offset((chunk.start - known.start) * spec.hidden * 2);
            self.join_halves(&work, programs, chunk.tokens, embedded, residual, normed, head)?;
            let attention = &head.attention;
            self.project_heads(&work, chunk.rows, attention, spec.head_dim, heads.clone(), normed, product)?;
            let params = AppendPromptParams {
                qkv: product,
                q_norm: vector(q_norm),
                k_norm: vector(k_norm),
                rotation: head.rotation.address(),
                entries: draft.entries.address(),
                pages: self.page_row(prompt.row),
                tail: Address::NONE,
                summaries: Address::NONE,
                tokens: chunk.tokens as i32,
                first_query: chunk.tokens as i32,
                q_heads: spec.q_heads as i32,
                kv_heads: spec.kv_heads as i32,
                max_tiles: 0,
                first_block: (chunk.start / BLOCK_TOKENS) as i32,
                last_block: -1,
                eps: spec.norm_eps,
            };
            let grid = (chunk.tokens.div_ceil(BLOCK_TOKENS) as u32, (spec.q_heads + spec.kv_heads) as u32);
            // SAFETY: the row has pages for the whole window.
            unsafe { programs.layer.append_prompt.launch(work.stream, grid, &params)? };
        }
        Ok(())
    }

    fn queue_first_token(&self, prompt: Prompt) -> Result<(), DeviceError> {
        let (work, memory, spec) = (self.prefill(), &self.memory.prefill, &self.model.spec);
        let last = memory.residual.address().offset((prompt.tokens - 1) * spec.hidden * 2);
        let normed = memory.normed.address();
        self.norm_rows(1, last, &self.model.norm, normed, spec.norm_eps)?;
        self.linear_strided(&work, (1, 1), self.model.output(), normed, memory.logits.address(), spec.hidden)?;
        let shared = &self.memory.shared;
        let choice = Choice {
            memory: &memory.sampler,
            rows: 1,
            first: Some(prompt.row),
            logits: memory.logits.address(),
            vocab: spec.vocab,
            position: shared.prefill_position(),
            token: shared.outputs_address().offset(prompt.row * 4),
        };
        self.choose(&work, &choice)
    }
}

fn vector(vector: &Option<DeviceVector>) -> Address {
    vector.as_ref().map_or(Address::NONE, |vector| vector.address())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_tokens_and_stay_within_the_room_for_one_more() {
        for chunk in [16, 64, 4096] {
            for start in [0, 16, 4080] {
                for len in [1, 2, 15, 16, 17, 127, 128, 129, 4095, 4096, 4097, 10_000] {
                    let (tokens, mut next) = (start..start + len, start);
                    for part in chunks(tokens.clone(), chunk) {
                        assert_eq!(part.start, next);
                        assert!(part.start.is_multiple_of(BLOCK_TOKENS), "the append of a chunk begins with a block");
                        assert!((1..=part.rows).contains(&part.tokens) && (16..=chunk).contains(&part.rows));
                        assert!(part.rows.is_power_of_two() && part.start + part.rows < tokens.end + chunk);
                        next += part.tokens;
                    }
                    assert_eq!(next, tokens.end);
                }
            }
        }
        assert_eq!(chunks(0..0, 64).count(), 0);
    }

    #[test]
    fn the_last_token_passes_as_few_rows_as_a_product_has() {
        for tokens in [1, 15, 16, 17, 4096, 4097, 32_000] {
            let last = chunks(tokens - 1..tokens, 4096).collect::<Vec<_>>();
            assert_eq!(last, [Chunk { start: tokens - 1, tokens: 1, rows: 16 }]);
        }
    }
}
