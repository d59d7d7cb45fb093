//! What is kept for choices other than the usual one: of queries a layer ahead, and of queries that have turned away.

use crate::device::{Device, DeviceBuffer, DeviceError};
use crate::kernels::Address;
use half::bf16;
use oasis_core::policy::Correction;

/// Which blocks of which rows are ranked.
#[derive(Clone, Copy)]
pub(super) struct RankedRows {
    /// i32 `[rows]`: position of the newest token; -1 where there is nothing to rank.
    pub newest: Address,
    /// i32 `[rows]`: complete blocks.
    pub blocks: Address,
    /// i32 `[rows + 1]`: summary tiles of a KV head before each row.
    pub tile_start: Address,
}

/// Queries of layers whose input is not there yet.
pub(super) struct AheadQueries {
    /// bf16 `[2][rows][q_heads * head_dim]`: layers take turns, since a scan may still read when the next are written.
    queries: DeviceBuffer<bf16>,
}

impl AheadQueries {
    /// Queries of a row have `width` elements.
    pub fn new(device: &Device, rows: usize, width: usize) -> Result<Self, DeviceError> {
        Ok(Self { queries: device.zeros(2 * rows * width)? })
    }

    pub fn of_layer(&self, layer: usize) -> Address {
        self.queries.address().offset(layer % 2 * self.queries.bytes() / 2)
    }
}

/// Queries of the step before, and the rows that choose again.
pub(super) struct CorrectionMemory {
    pub rule: Correction,
    /// bf16 `[layers][rows][q_heads * head_dim]`.
    pub kept: DeviceBuffer<bf16>,
    rows: usize,
    /// Elements of a row's queries.
    width: usize,
    /// i32: positions `[stride]`, blocks `[stride]`, first tiles `[stride]`, as a selection and a scan take them. Of one
    /// layer after the other.
    ranked: DeviceBuffer<i32>,
    stride: usize,
    /// u32 `[1]`.
    pub arrived: DeviceBuffer<u32>,
    /// u64 `[1]`: rows that have chosen again, summed over layers and steps.
    pub corrected: DeviceBuffer<u64>,
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

    pub fn first(&self, layer: usize, row: usize) -> usize {
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

    pub fn ranked_rows(&self) -> RankedRows {
        let array = |index: usize| self.ranked.address().offset(index * self.stride * 4);
        RankedRows { newest: array(0), blocks: array(1), tile_start: array(2) }
    }

    /// Rows that have chosen again since the start, summed over layers and steps.
    pub fn corrected(&self) -> Result<u64, DeviceError> {
        Ok(self.corrected.read()?[0])
    }
}
