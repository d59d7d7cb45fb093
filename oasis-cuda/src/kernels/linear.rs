//! Linear layers of few rows.

use super::{Address, KernelParams, KernelSpec, file, unit};
use crate::compile::Unit;
use crate::device::{Device, DeviceError, HeadRows, TensorMap};
use crate::gemm::{GemmShape, Operands, Output};

/// `y[rows][out] = x[rows][inner] . w[out][inner]^T` for few rows: weights are read once, at the speed of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearStream {
    /// Most rows of `x`: 8, 16, 32 or 64.
    pub columns: usize,
    /// Outputs of a cluster: 64 or 128.
    pub tile: usize,
}

/// Parameters of [`LinearStream`], made by [`LinearStream::params`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct LinearStreamParams {
    w: TensorMap,
    x: TensorMap,
    y: Address,
    bias: Address,
    rows: i32,
    out: i32,
    inner: i32,
    y_stride: i32,
    wide: i32,
    accumulate: i32,
}

// SAFETY: the fields are those of `Params` in linear_stream.cu.
unsafe impl KernelParams for LinearStreamParams {}

/// Elements of the inner dimension that are copied and multiplied at a time.
const STEP: usize = 64;

impl LinearStream {
    /// Most rows.
    pub const MOST_ROWS: usize = 64;
    /// Most CTAs that share the inner dimension.
    pub const MOST_SPLIT: usize = 8;

    /// The kernel with `tile` outputs a cluster for `rows` rows; `None` for more than [`Self::MOST_ROWS`].
    pub fn for_rows(rows: usize, tile: usize) -> Option<Self> {
        let columns = rows.next_power_of_two().max(8);
        (columns <= Self::MOST_ROWS).then_some(Self { columns, tile })
    }

    /// CTAs for `out` outputs in clusters of `split`, which share the inner dimension.
    pub fn ctas(&self, out: usize, split: usize) -> u32 {
        (out.div_ceil(self.tile) * split) as u32
    }

    /// Parameters for `shape`, of at most [`LinearStream::columns`] rows.
    ///
    /// # Errors
    /// As [`Device::tensor_map`].
    pub fn params(
        &self,
        device: &Device,
        shape: &GemmShape,
        operands: &Operands,
    ) -> Result<LinearStreamParams, DeviceError> {
        let matrix = |address, rows, stride| {
            let bytes = stride * 2;
            HeadRows { address, tokens: rows, heads: 1, head_dim: shape.inner, token_bytes: bytes, head_bytes: bytes }
        };
        Ok(LinearStreamParams {
            w: device.tensor_map(&matrix(operands.w, shape.out, shape.w_stride), self.tile)?,
            x: device.tensor_map(&matrix(operands.x, shape.rows, shape.x_stride), self.columns)?,
            y: operands.y,
            bias: if shape.bias { operands.bias } else { Address::NONE },
            rows: shape.rows as i32,
            out: shape.out as i32,
            inner: shape.inner as i32,
            y_stride: shape.y_stride as i32,
            wide: i32::from(shape.output == Output::F32),
            accumulate: i32::from(shape.accumulate),
        })
    }

    fn stage_bytes(&self) -> usize {
        (self.tile + self.columns) * STEP * 2
    }

    /// Steps in flight: as many as leave room for 3 CTAs of 64 outputs a multiprocessor, or 2 of 128.
    fn stages(&self) -> usize {
        let kib = if self.tile <= 64 { 72 } else { 108 };
        (kib << 10) / self.stage_bytes()
    }
}

impl KernelSpec for LinearStream {
    type Params = LinearStreamParams;
    const ENTRY: &'static str = "stream_linear";
    const WAITS: bool = true;

    fn unit(&self) -> Unit {
        let defines = [("COLUMNS", self.columns), ("TILE", self.tile), ("STAGES", self.stages())];
        unit(file!("linear_stream.cu"), &defines)
    }

    fn threads(&self) -> u32 {
        2 * self.tile as u32 + 32
    }

    fn shared_bytes(&self) -> usize {
        // 1,024 bytes to begin at a multiple of them; two barriers a stage.
        1024 + self.stages() * (self.stage_bytes() + 16)
    }
}
