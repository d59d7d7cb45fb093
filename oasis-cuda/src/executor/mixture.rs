//! A mixture of experts as the device runs it: its shape, its kernels and its working memory.

use crate::compile::Compiler;
use crate::device::{Device, DeviceBuffer, DeviceError, Kernel};
use crate::kernels::{Combine, ExpertLayer, ExpertStream, ExpertTiles, Route, SortPairs};
use half::bf16;
use oasis_models::spec::DecoderSpec;

/// Most pairs an expert, on average, that are streamed. On an H200, with 128 experts of 2048 x 768: 328 us for 16 pairs an
/// expert, where tiles take 379 us for 32.
const STREAMED_PAIRS: usize = 24;

/// A mixture that the device runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertShape {
    pub experts: usize,
    pub top: usize,
    pub hidden: usize,
    pub inner: usize,
    pub normalize: bool,
}

impl ExpertShape {
    /// The mixture of a model; `None` where it has none.
    ///
    /// # Errors
    /// [`DeviceError`] for shapes that the kernels do not run.
    pub fn of(spec: &DecoderSpec) -> Result<Option<Self>, DeviceError> {
        let Some(moe) = &spec.moe else { return Ok(None) };
        let (experts, top, hidden, inner) = (moe.experts, moe.experts_per_token, spec.hidden, moe.intermediate);
        let refuse = |problem: String| {
            Err(DeviceError::new("preparing a mixture of experts", problem).hint("device.kind = \"cpu\" runs any"))
        };
        if !experts.is_multiple_of(32) || !(1..=experts.min(32)).contains(&top) {
            return refuse(format!(
                "expected a multiple of 32 experts, of which a token takes at most 32, found {experts} and {top}"
            ));
        }
        if [hidden, inner].iter().any(|width| !width.is_multiple_of(64) || *width < 128) {
            return refuse(format!(
                "expected multiples of 64, at least 128, for the widths of the residual stream and of an expert, found \
                 {hidden} and {inner}"
            ));
        }
        Ok(Some(Self { experts, top, hidden, inner, normalize: moe.normalize }))
    }

    /// Gate and up, and down.
    pub fn layers(self) -> [ExpertLayer; 2] {
        let Self { experts, hidden, inner, .. } = self;
        let layer = |out, inner, gated| ExpertLayer { experts, out, inner, gated };
        [layer(inner, hidden, true), layer(hidden, inner, false)]
    }

    pub fn streamed(self, rows: usize) -> bool {
        rows * self.top <= STREAMED_PAIRS * self.experts
    }

    /// Bytes of what the experts of at most `rows` rows give: f32 where they are streamed, else bf16.
    pub fn part_bytes(self, rows: usize) -> usize {
        let pairs = rows * self.top;
        let streamed = pairs.min(STREAMED_PAIRS * self.experts);
        (streamed * 4).max(pairs * 2) * self.hidden
    }

    /// Bytes of [`ExpertMemory`] for `rows` rows, but for the starts of experts.
    pub fn bytes(self, rows: usize) -> usize {
        let pairs = rows * self.top;
        rows * self.experts * 4 + pairs * (4 * 4 + self.inner * 2) + self.part_bytes(rows)
    }
}

/// Kernels of a model's mixtures.
pub(super) struct ExpertPrograms {
    pub shape: ExpertShape,
    pub route: Kernel<Route>,
    pub sort: Kernel<SortPairs>,
    pub stream: [Kernel<ExpertStream>; 2],
    pub tiles: [Kernel<ExpertTiles>; 2],
    /// Of f32 parts, and of bf16 parts.
    pub combine: [Kernel<Combine>; 2],
}

impl ExpertPrograms {
    pub fn load(device: &Device, compiler: &Compiler, shape: ExpertShape) -> Result<Self, DeviceError> {
        let (ExpertShape { experts, top, .. }, [up, down]) = (shape, shape.layers());
        let combine = |narrow| device.load(compiler, &Combine { top, narrow });
        Ok(Self {
            shape,
            route: device.load(compiler, &Route { experts, top })?,
            sort: device.load(compiler, &SortPairs)?,
            stream: [device.load(compiler, &ExpertStream(up))?, device.load(compiler, &ExpertStream(down))?],
            tiles: [device.load(compiler, &ExpertTiles(up))?, device.load(compiler, &ExpertTiles(down))?],
            combine: [combine(false)?, combine(true)?],
        })
    }
}

/// Working memory of mixtures, for a number of rows.
pub(super) struct ExpertMemory {
    /// f32 `[rows][experts]`.
    pub logits: DeviceBuffer<f32>,
    /// i32 `[rows][top]`.
    pub expert: DeviceBuffer<i32>,
    /// f32 `[rows][top]`.
    pub weight: DeviceBuffer<f32>,
    /// i32 `[layers][experts + 1]`: pairs of lower experts.
    pub start: DeviceBuffer<i32>,
    /// i32 `[pairs]`.
    pub pair_row: DeviceBuffer<i32>,
    /// i32 `[rows][top]`.
    pub pair_at: DeviceBuffer<i32>,
    /// bf16 `[pairs][inner]`.
    pub inner: DeviceBuffer<bf16>,
    /// f32 or bf16 `[pairs][hidden]`.
    pub parts: DeviceBuffer<u8>,
    pub experts: usize,
}

impl ExpertMemory {
    pub fn new(device: &Device, shape: ExpertShape, layers: usize, rows: usize) -> Result<Self, DeviceError> {
        let pairs = rows * shape.top;
        Ok(Self {
            logits: device.zeros(rows * shape.experts)?,
            expert: device.zeros(pairs)?,
            weight: device.zeros(pairs)?,
            start: device.zeros(layers * (shape.experts + 1))?,
            pair_row: device.zeros(pairs)?,
            pair_at: device.zeros(pairs)?,
            inner: device.zeros(pairs * shape.inner)?,
            parts: device.zeros(shape.part_bytes(rows))?,
            experts: shape.experts,
        })
    }

    /// Experts that had rows when each layer ran last, summed over the layers.
    pub fn active(&self) -> Result<usize, DeviceError> {
        let start = self.start.read()?;
        let layer = |start: &[i32]| start.windows(2).filter(|pair| pair[1] > pair[0]).count();
        Ok(start.chunks(self.experts + 1).map(layer).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_models::shapes;

    fn qwen() -> DecoderSpec {
        shapes::named("qwen3-30b-a3b").expect("the shape is known").0
    }

    #[test]
    fn shapes_that_the_kernels_do_not_run_are_refused() {
        assert!(ExpertShape::of(&qwen()).unwrap().is_some());
        assert_eq!(ExpertShape::of(&DecoderSpec { moe: None, ..qwen() }), Ok(None));
        for (experts, top, hidden, inner, found) in [
            (60, 4, 2048, 768, "found 60 and 4"),
            (32, 33, 2048, 768, "found 32 and 33"),
            (64, 0, 2048, 768, "found 64 and 0"),
            (64, 8, 2048, 96, "found 2048 and 96"),
            (64, 8, 2080, 128, "found 2080 and 128"),
            (64, 8, 2048, 64, "found 2048 and 64"),
        ] {
            let mut spec = DecoderSpec { hidden, ..qwen() };
            let moe = spec.moe.as_mut().expect("it has experts");
            (moe.experts, moe.experts_per_token, moe.intermediate) = (experts, top, inner);
            let error = ExpertShape::of(&spec).unwrap_err().to_string();
            assert!(error.contains(found), "{error}");
        }
    }

    #[test]
    fn parts_have_room_in_either_precision() {
        let shape = ExpertShape::of(&qwen()).unwrap().unwrap();
        for rows in [1, 16, 384, 385, 400, 800, 8192] {
            for fewer in [1, rows.min(384), rows] {
                let element = if shape.streamed(fewer) { 4 } else { 2 };
                assert!(shape.part_bytes(rows) >= fewer * 8 * 2048 * element, "{fewer} of {rows} rows");
            }
        }
    }
}
