//! Prefill, layer by layer: the whole prompt passes a layer before the next one begins. The device holds the full KV of
//! a few layers only, while those before are on their way to the host.

use super::experts::Routed;
use super::parts::{Parts, Work};
use super::plan::geometry;
use super::sampling::Choice;
use super::scope::HostLayers;
use crate::device::{DeviceError, HeadRows, Range};
use crate::gemm::{GemmShape, Output};
use crate::kernels::{AddNormParams, Address, AppendPromptParams, EmbedParams};
use crate::layout::{BLOCK_TOKENS, entry_bytes};
use crate::model::{DeviceAttention, DeviceVector, FeedForward};

/// A prompt that is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prompt {
    pub row: usize,
    pub tokens: usize,
    /// Where its full KV goes; `None` in dense decoding.
    pub host: Option<HostLayers>,
}

/// Rows of a chunk: those asked for, those that are computed.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    tokens: usize,
    rows: usize,
}

/// Chunks of `tokens` tokens. The last one is rounded up to one of few sizes, so that products need few plans.
fn chunks(tokens: usize, chunk: usize) -> impl Iterator<Item = Chunk> {
    (0..tokens).step_by(chunk).map(move |start| {
        let tokens = (tokens - start).min(chunk);
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
        let _range = Range::begin(|| format!("prefill layer {index}"));
        let (work, memory, spec) = (self.prefill(), &self.memory.prefill, &self.model.spec);
        let layer = &self.model.layers[index];
        self.collect_taps(prompt, index)?;
        let width = (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim;
        for chunk in chunks(prompt.tokens, memory.chunk) {
            let residual = memory.residual.address().offset(chunk.start * spec.hidden * 2);
            let qkv = memory.qkv.address().offset(chunk.start * width * 2);
            self.norm_rows(chunk.tokens, residual, &layer.input_norm, memory.normed.address(), spec.norm_eps)?;
            let (rows, attention) = ((chunk.rows, chunk.rows), &layer.attention);
            self.linear_with_bias(
                &work,
                rows,
                &attention.qkv,
                attention.qkv_bias.as_ref(),
                memory.normed.address(),
                qkv,
            )?;
        }
        self.append_prompt_layer(prompt, index)?;
        self.attend_prompt(prompt)?;
        for chunk in chunks(prompt.tokens, memory.chunk) {
            let rows = (chunk.rows, chunk.rows);
            let residual = memory.residual.address().offset(chunk.start * spec.hidden * 2);
            let attended = memory.attended.address().offset(chunk.start * spec.q_heads * spec.head_dim * 2);
            let normed = memory.normed.address();
            self.linear_onto(&work, rows, &layer.attention.o, attended, residual)?;
            self.norm_rows(chunk.tokens, residual, &layer.post_attention_norm, normed, spec.norm_eps)?;
            self.prompt_feed_forward(&work, chunk, index, residual)?;
        }
        if index + 1 == self.layers() {
            self.queue_draft_cache(prompt)?;
            self.queue_first_token(prompt)?;
        }
        work.stream.record(&self.events.prefilled[index])
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

    /// Adds what the head takes of this layer's input: the products with the parts of `fc` are summed, so that no hidden
    /// state is kept but that of the last token.
    fn collect_taps(&self, prompt: Prompt, index: usize) -> Result<(), DeviceError> {
        let (Some(head), Some(draft)) = (&self.model.head, &self.memory.draft) else { return Ok(()) };
        let (work, memory, hidden) = (self.prefill(), &self.memory.prefill, self.model.spec.hidden);
        for (tap, _) in head.taps.iter().enumerate().filter(|(_, tapped)| **tapped == index) {
            for chunk in chunks(prompt.tokens, memory.chunk) {
                let shape = GemmShape {
                    accumulate: true,
                    w_stride: 3 * hidden,
                    ..GemmShape::dense(chunk.rows, head.spec.hidden, hidden)
                };
                let x = memory.residual.address().offset(chunk.start * hidden * 2);
                let y = memory.head_input.address().offset(chunk.start * head.spec.hidden * 2);
                self.product(&work, shape, head.fc.address().offset(tap * hidden * 2), x, y, Address::NONE)?;
            }
            let last = memory.residual.address().offset((prompt.tokens - 1) * hidden * 2);
            let taps = draft.taps.address().offset((prompt.row * 3 + tap) * hidden * 2);
            // SAFETY: one row on both sides; the taps are those of a row that does not decode yet.
            unsafe { work.stream.copy(taps, last, hidden * 2)? };
        }
        Ok(())
    }

    /// Norms, rotation, entries and summaries of a layer, then the copy of its entries to the host.
    fn append_prompt_layer(&self, prompt: Prompt, index: usize) -> Result<(), DeviceError> {
        let (work, memory, spec) = (self.prefill(), &self.memory.prefill, &self.model.spec);
        let entry = entry_bytes(spec.head_dim);
        let attention = &self.model.layers[index].attention;
        let pair = prompt.row * spec.kv_heads;
        let (entries, pages, tail, summaries) = match &self.memory.sparse {
            None => (self.memory.dense[index].address(), self.page_row(prompt.row), Address::NONE, Address::NONE),
            Some(sparse) => {
                if let Some(before) = index.checked_sub(self.plan.prefill_layers) {
                    // Its place in `staging` is used again.
                    work.stream.wait(&self.events.copied[before])?;
                }
                let sets = &sparse.layers[index];
                let tail = sets.tail.address().offset(pair * 2 * entry);
                let summaries = self.summaries(sets, pair);
                (self.staging(sparse, index), Address::NONE, tail, summaries)
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

    fn attend_prompt(&self, prompt: Prompt) -> Result<(), DeviceError> {
        let (memory, spec) = (&self.memory.prefill, &self.model.spec);
        let heads = spec.q_heads + 2 * spec.kv_heads;
        let all = HeadRows::dense(memory.qkv.address(), prompt.tokens, heads, spec.head_dim);
        let (q, k, v) = (
            all.head_range(0, spec.q_heads),
            all.head_range(spec.q_heads, spec.kv_heads),
            all.head_range(spec.q_heads + spec.kv_heads, spec.kv_heads),
        );
        let out = HeadRows::dense(memory.attended.address(), prompt.tokens, spec.q_heads, spec.head_dim);
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
        let DeviceAttention { qkv, qkv_bias, q_norm, k_norm, .. } = &head.attention;
        let known = prompt.tokens - 1;
        // No more blocks than pages: those of one launch are written in any order.
        let window = geometry(&self.model.spec).window_start(known, Some(self.extent.draft_blocks));
        for mut chunk in chunks(known - window, memory.chunk) {
            chunk.start += window;
            let tokens = memory.prompt.address().offset((chunk.start + 1) * 4);
            let (embedded, normed, product) = (memory.gate_up.address(), memory.normed.address(), memory.qkv.address());
            self.embed_prompt(table, tokens, chunk.tokens, embedded, spec.hidden)?;
            let residual = memory.head_input.address().offset(chunk.start * spec.hidden * 2);
            self.join_halves(&work, programs, chunk.tokens, embedded, residual, normed, head)?;
            self.linear_with_bias(&work, (chunk.rows, chunk.rows), qkv, qkv_bias.as_ref(), normed, product)?;
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
