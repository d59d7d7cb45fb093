//! Choices that are made again where queries have turned away: before attention, which waits for selection and transfer.

use super::choices::{CorrectionMemory, RankedRows};
use super::memory::SparseMemory;
use super::parts::Parts;
use super::scope::Scope;
use super::stages::Stages;
use crate::device::{DeviceError, Stream};
use crate::kernels::{Address, CorrectParams};
use oasis_core::pipeline::Track;

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
