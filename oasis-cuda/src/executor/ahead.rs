//! Choices a layer ahead: by the query that a layer would have with the input of the layer before. Scan, selection and
//! transfer run beside the layer before; attention waits for what is left of them.

use super::memory::SparseMemory;
use super::parts::{Parts, Work};
use super::programs::SparsePrograms;
use super::scope::Scope;
use super::stages::Stages;
use crate::device::DeviceError;
use crate::gemm::GemmShape;
use crate::kernels::{Address, AppendParams};
use oasis_core::pipeline::Track;

impl Parts {
    /// Begins the choice of the layer after `layer`, whose input is in the residual stream and whose own queries, keys and
    /// values are where attention reads them.
    pub fn choose_ahead(&self, scope: Scope, layer: usize) -> Result<(), DeviceError> {
        let Some((sparse, programs)) = self.sparse() else { return Ok(()) };
        let Some(ahead) = &sparse.ahead else { return Ok(()) };
        let next = layer + 1;
        if scope.is_first() || next == self.layers() {
            return Ok(());
        }
        let (work, streams, query) = (self.foreground(), &self.streams, ahead.of_layer(next));
        self.span(work.stream, Track::Foreground, "qkv ahead", layer, || {
            self.project_ahead(&work, scope, next, query)
        })?;
        self.order(&streams.foreground, &streams.predict)?;
        let stages = Stages { query, ..self.stages(scope, sparse, programs, next) };
        self.scan(stages, &streams.predict)?;
        self.select(stages, &streams.predict)?;
        self.order(&streams.predict, &streams.transfer)?;
        if !self.host_carries() {
            self.gather(programs, next, &streams.transfer, self.stamps(next))?;
            streams.transfer.record(&self.events.transferred[next])?;
        }
        Ok(())
    }

    /// Lets the foreground wait for a choice that was made ahead.
    pub fn wait_for_choice(
        &self,
        sparse: &SparseMemory,
        programs: &SparsePrograms,
        layer: usize,
    ) -> Result<(), DeviceError> {
        let streams = &self.streams;
        if self.host_carries() {
            // Only now that the layer before has been queued, beside which the host waits.
            self.transfer_at_once(sparse, programs, layer, &streams.transfer)?;
            streams.transfer.record(&self.events.transferred[layer])?;
        }
        streams.foreground.wait(&self.events.transferred[layer])
    }

    /// Queries of `layer`, normalised and rotated, from the residual stream as it is.
    fn project_ahead(&self, work: &Work<'_>, scope: Scope, layer: usize, query: Address) -> Result<(), DeviceError> {
        let (spec, activations) = (&self.model.spec, &self.memory.activations);
        let (weights, programs) = (&self.model.layers[layer], &self.programs.layer);
        let attention = &weights.attention;
        let requests = scope.requests();
        self.norm(work, programs, activations, requests, Address::NONE, &weights.input_norm, spec.norm_eps)?;
        let bias = attention.qkv_bias.as_ref().map_or(Address::NONE, |bias| bias.address());
        // The rows of the fused projection begin with those of queries.
        let shape = GemmShape {
            room: activations.rows,
            bias: attention.qkv_bias.is_some(),
            ..GemmShape::dense(requests, spec.q_heads * spec.head_dim, attention.qkv.cols)
        };
        let (x, y) = (activations.normed.address(), activations.qkv.address());
        self.product(work, shape, attention.qkv.address(), x, y, bias)?;
        let params = AppendParams {
            qkv: y,
            q_norm: attention.q_norm.as_ref().map_or(Address::NONE, |norm| norm.address()),
            k_norm: Address::NONE,
            rotation: self.model.rotation.address(),
            position: self.schedule(scope).position(),
            q: query,
            tail: Address::NONE,
            pages: Address::NONE,
            summaries: Address::NONE,
            requests: requests as i32,
            q_heads: spec.q_heads as i32,
            // No keys, no values: queries alone.
            kv_heads: 0,
            max_tiles: 0,
            page_stride: 0,
            eps: spec.norm_eps,
        };
        let ctas = programs.append_shape.ctas(requests, spec.q_heads, 0);
        // SAFETY: both sides have room for all rows; without KV heads nothing else is written. What was scanned by the
        // queries of two layers before has been waited for.
        unsafe { programs.append.launch(work.stream, (ctas, 1), &params) }
    }
}
