//! Choices that are made again where queries have turned away: before attention, which waits for selection and transfer.

use super::memory::SparseMemory;
use super::parts::Parts;
use super::step::{RankedRows, Scope, Stages};
use crate::device::{Device, DeviceBuffer, DeviceError, Stream};
use crate::kernels::{Address, CorrectParams};
use half::bf16;
use oasis_core::pipeline::Track;
use oasis_core::policy::Correction;

/// Queries of the step before, and the rows that choose again.
pub(super) struct CorrectionMemory {
    rule: Correction,
    /// bf16 `[layers][rows][q_heads * head_dim]`.
    kept: DeviceBuffer<bf16>,
    rows: usize,
    /// Elements of a row's queries.
    width: usize,
    /// i32: positions `[stride]`, blocks `[stride]`, first tiles `[stride]`, as a selection and a scan take them. Of one
    /// layer after the other.
    ranked: DeviceBuffer<i32>,
    stride: usize,
    /// u32 `[1]`.
    arrived: DeviceBuffer<u32>,
    /// u64 `[1]`: rows that have chosen again, summed over layers and steps.
    corrected: DeviceBuffer<u64>,
}

impl CorrectionMemory {
    /// Queries have `width` elements.
    pub fn new(
        device: &Device,
        rule: Correction,
        layers: usize,
        rows: usize,
        width: usize,
    ) -> Result<Self, DeviceError> {
        let stride = (rows + 1).next_multiple_of(4);
        Ok(Self {
            rule,
            kept: device.zeros(layers * rows * width)?,
            rows,
            width,
            ranked: device.zeros(3 * stride)?,
            stride,
            arrived: device.zeros(1)?,
            corrected: device.zeros(1)?,
        })
    }

    fn first(&self, layer: usize, row: usize) -> usize {
        (layer * self.rows + row) * self.width
    }

    /// A row's queries of its last step, `[q_heads][head_dim]`.
    pub fn queries(&self, layer: usize, row: usize) -> Result<Vec<f32>, DeviceError> {
        let queries = self.kept.read_at(self.first(layer, row), self.width)?;
        Ok(queries.into_iter().map(bf16::to_f32).collect())
    }

    /// Makes `queries` those of the row's last step.
    pub fn restore(&mut self, layer: usize, row: usize, queries: &[f32]) -> Result<(), DeviceError> {
        let queries: Vec<bf16> = queries.iter().copied().map(bf16::from_f32).collect();
        self.kept.write_at(self.first(layer, row), &queries)
    }

    fn ranked_rows(&self) -> RankedRows {
        let array = |index: usize| self.ranked.address().offset(index * self.stride * 4);
        RankedRows { newest: array(0), blocks: array(1), tile_start: array(2) }
    }

    /// Rows that have chosen again since the start, summed over layers and steps.
    pub fn corrected(&self) -> Result<u64, DeviceError> {
        Ok(self.corrected.read()?[0])
    }
}

impl Parts {
    /// Chooses again, by the queries that are about to attend, for the rows whose queries have turned away since the step
    /// before, and waits for their transfer, all on `stream`. The layer's transfer of the step before is done.
    pub fn correct(&self, stages: Stages<'_>, stream: &Stream) -> Result<(), DeviceError> {
        let Some(memory) = &stages.sparse.correction else { return Ok(()) };
        let rows = memory.ranked_rows();
        self.find_corrections(memory, stages, rows, stream)?;
        let again = Stages { rows, ..stages };
        self.scan(again, stream)?;
        self.select(again, stream)?;
        self.transfer_at_once(stages.sparse, stages.programs, stages.layer, stream)
    }

    /// Keeps the queries of a first step for the next one.
    pub fn keep_queries(&self, stages: Stages<'_>, stream: &Stream) -> Result<(), DeviceError> {
        let Some(memory) = &stages.sparse.correction else { return Ok(()) };
        let none = RankedRows { newest: Address::NONE, blocks: Address::NONE, tile_start: Address::NONE };
        self.find_corrections(memory, stages, none, stream)
    }

    fn find_corrections(
        &self,
        memory: &CorrectionMemory,
        stages: Stages<'_>,
        rows: RankedRows,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let Some(kernel) = &stages.programs.correct else { return Ok(()) };
        let (scope, spec): (Scope, _) = (stages.scope, &self.model.spec);
        let first = memory.first(stages.layer, scope.first_row());
        let params = CorrectParams {
            q: stages.query,
            kept: memory.kept.address().offset(first * 2),
            position: self.schedule(scope).position(),
            ranked: rows.newest,
            blocks: rows.blocks,
            tile_start: rows.tile_start,
            arrived: memory.arrived.address(),
            corrected: memory.corrected.address(),
            requests: scope.requests() as i32,
            kv_heads: spec.kv_heads as i32,
            min_similarity: memory.rule.min_similarity,
        };
        // SAFETY: queries, those kept and the arrays have room for all rows; one launch at a time uses them.
        self.span(stream, Track::Predict, "compare queries", stages.layer, || unsafe {
            kernel.launch(stream, (scope.requests() as u32, 1), &params)
        })
    }
}

/// Rows that have chosen again since the start; 0 where choices are not corrected.
pub(super) fn corrected_rows(sparse: Option<&SparseMemory>) -> Result<u64, DeviceError> {
    sparse.and_then(|sparse| sparse.correction.as_ref()).map_or(Ok(0), CorrectionMemory::corrected)
}
