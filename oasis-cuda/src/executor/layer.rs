//! What a layer of a step consists of: projections, what is appended, attention, norms, MLP.

use super::memory::Activations;
use super::options::Residency;
use super::parts::{Parts, Work};
use super::programs::LayerPrograms;
use super::scope::Scope;
use crate::device::DeviceError;
use crate::gemm::Output;
use crate::kernels::{ActivationParams, AddNormParams, Address, AppendParams, AttentionParams};
use crate::layout::entry_bytes;
use crate::model::{DeviceAttention, DeviceMlp, DeviceVector};

/// An attention layer's shape, the target's or the head's.
pub(super) struct HeadShape {
    pub q_heads: usize,
    pub kv_heads: usize,
}

/// Where an attention layer keeps its KV.
pub(super) struct KvPlace {
    /// Tails, or pages.
    pub append_to: Address,
    pub pages: Address,
    pub summaries: Address,
    pub entries: Address,
    pub tail: Address,
    pub slots: usize,
}

impl Parts {
    pub fn mlp(
        &self,
        work: &Work<'_>,
        activations: &Activations,
        rows: usize,
        mlp: &DeviceMlp,
    ) -> Result<(), DeviceError> {
        let (normed, room) = (activations.normed.address(), activations.rows);
        let (gate_up, inner) = (activations.gate_up.address(), activations.inner.address());
        self.linear(work, (rows, room), &mlp.gate_up, normed, gate_up, Output::Bf16)?;
        self.swiglu(work, rows, mlp.down.cols, gate_up, inner)?;
        self.linear(work, (rows, room), &mlp.down, inner, activations.added.address(), Output::Bf16)
    }

    /// Queues SwiGLU of `rows` rows.
    pub fn swiglu(
        &self,
        work: &Work<'_>,
        rows: usize,
        width: usize,
        gate_up: Address,
        out: Address,
    ) -> Result<(), DeviceError> {
        let params = ActivationParams { gate_up, out, rows: rows as i32, width: width as i32 };
        let ctas = crate::kernels::Activation.ctas(rows, width);
        // SAFETY: both activations have room for `rows` rows of that width.
        unsafe { self.programs.activation.launch(work.stream, (ctas, 1), &params) }
    }

    /// Adds `added` to the residual, where there is any, and writes its norm.
    #[allow(clippy::too_many_arguments)]
    pub fn norm(
        &self,
        work: &Work<'_>,
        programs: &LayerPrograms,
        activations: &Activations,
        rows: usize,
        added: Address,
        weight: &DeviceVector,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let hidden = weight.len() as i32;
        let params = AddNormParams {
            residual: activations.residual.address(),
            x: added,
            weight: weight.address(),
            out: activations.normed.address(),
            hidden,
            out_stride: hidden,
            eps,
        };
        // SAFETY: the activations have room for `rows` rows.
        unsafe { programs.norm.launch(work.stream, (rows as u32, 1), &params) }
    }

    pub fn kv_place(&self, scope: Scope, layer: usize) -> KvPlace {
        let spec = &self.model.spec;
        let row = scope.first_row();
        let entry = entry_bytes(spec.head_dim);
        match &self.memory.sparse {
            None => {
                let pages = self.page_row(row);
                let entries = self.memory.dense[layer].address();
                let slots = self.extent.blocks;
                KvPlace { append_to: entries, pages, summaries: Address::NONE, entries, tail: Address::NONE, slots }
            }
            Some(sparse) => {
                let sets = &sparse.layers[layer];
                let pair = row * spec.kv_heads;
                let tail = sets.tail.address().offset(pair * 2 * entry);
                let summaries = self.summaries(sets, pair);
                match scope {
                    Scope::Batch(_) => KvPlace {
                        append_to: tail,
                        pages: Address::NONE,
                        summaries,
                        entries: sets.slots.address(),
                        tail,
                        slots: self.extent.slots,
                    },
                    Scope::First(_) => KvPlace {
                        append_to: tail,
                        pages: Address::NONE,
                        summaries,
                        entries: sparse.staging.layer(layer),
                        tail,
                        slots: self.extent.blocks,
                    },
                }
            }
        }
    }

    /// Pages of a row.
    pub fn page_row(&self, row: usize) -> Address {
        self.memory.page_table.address().offset(row * self.extent.blocks * 4)
    }

    /// QKV product of normalised rows.
    pub fn project(
        &self,
        work: &Work<'_>,
        rows: usize,
        activations: &Activations,
        attention: &DeviceAttention,
    ) -> Result<(), DeviceError> {
        let (x, y) = (activations.normed.address(), activations.qkv.address());
        self.linear_with_bias(work, (rows, activations.rows), &attention.qkv, attention.qkv_bias.as_ref(), x, y)
    }

    /// Norms and rotation of queries and keys; keys and values go to their block.
    #[allow(clippy::too_many_arguments)]
    pub fn append(
        &self,
        work: &Work<'_>,
        programs: &LayerPrograms,
        shape: &HeadShape,
        attention: &DeviceAttention,
        activations: &Activations,
        requests: usize,
        (position, rotation): (Address, Address),
        place: &KvPlace,
        q: Address,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let vector = |vector: &Option<DeviceVector>| vector.as_ref().map_or(Address::NONE, |v| v.address());
        let params = AppendParams {
            qkv: activations.qkv.address(),
            q_norm: vector(&attention.q_norm),
            k_norm: vector(&attention.k_norm),
            rotation,
            position,
            q,
            tail: place.append_to,
            pages: place.pages,
            summaries: place.summaries,
            requests: requests as i32,
            q_heads: shape.q_heads as i32,
            kv_heads: shape.kv_heads as i32,
            max_tiles: self.extent.tiles as i32,
            page_stride: self.extent.blocks as i32,
            eps,
        };
        let ctas = programs.append_shape.ctas(requests, shape.q_heads, shape.kv_heads);
        // SAFETY: positions lie below the longest context, for which tables, tails, pages and summaries are sized.
        unsafe { programs.append.launch(work.stream, (ctas, 1), &params) }
    }

    pub fn attend(
        &self,
        work: &Work<'_>,
        scope: Scope,
        shape: &HeadShape,
        place: &KvPlace,
        q: Address,
    ) -> Result<(), DeviceError> {
        let (schedule, activations) = (self.schedule(scope), &self.memory.activations);
        let programs = &self.programs.layer;
        let first = scope.is_first();
        let kernel = match (&self.programs.sparse, first) {
            (Some(sparse), true) => &sparse.full,
            _ => &programs.attention,
        };
        let pages = match &self.memory.sparse {
            Some(sparse) if first => sparse.identity.address(),
            _ => place.pages,
        };
        let params = AttentionParams {
            q,
            entries: place.entries,
            pages,
            tail: place.tail,
            start: schedule.entry_start(),
            position: schedule.position(),
            out: activations.attended.address(),
            partial: activations.partial.address(),
            arrived: activations.arrived.address(),
            requests: scope.requests() as i32,
            kv_heads: shape.kv_heads as i32,
            slots: place.slots as i32,
            scale: programs.attention_shape.scale(),
        };
        // SAFETY: slots, tails and pages hold what the schedule says; partial sums are sized for the grid.
        unsafe { kernel.launch(work.stream, (self.attention_ctas(scope), 1), &params) }
    }

    /// CTAs of attention and of the scan: beside a gather, some multiprocessors are left to it.
    pub fn attention_ctas(&self, scope: Scope) -> u32 {
        let multiprocessors = self.device.facts.multiprocessors;
        match (&self.options.residency, scope) {
            // Beside so little work more CTAs cost more in putting parts together than they save.
            (Residency::Sparse(_), Scope::Batch(1)) => multiprocessors / 2,
            (Residency::Sparse(sparse), Scope::Batch(_)) => {
                multiprocessors - sparse.gather.ctas.min(multiprocessors / 2)
            }
            _ => 2 * multiprocessors,
        }
    }

    /// Queries of a layer: each has its own, which its scan may still read while the next layer's are written.
    pub fn query_buffer(&self, layer: usize) -> Address {
        let activations = &self.memory.activations;
        activations.q.address().offset(layer * activations.attended.bytes())
    }
}
