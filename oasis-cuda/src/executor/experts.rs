//! Mixtures of experts in steps and prefills.
//!
//! A router gives each row its experts; pairs of a row and an expert are sorted by expert. Few pairs an expert go by
//! [`ExpertStream`], which reads weights at the speed of the memory, many by [`ExpertTiles`], which multiplies at the speed
//! of the tensor cores. Parts of a row are added in the order of its experts' numbers.

use super::memory::Activations;
use super::parts::{Parts, Work};
use crate::compile::Compiler;
use crate::device::{Device, DeviceBuffer, DeviceError, Kernel};
use crate::gemm::Output;
use crate::kernels::{
    Address, Combine, CombineParams, ExpertLayer, ExpertParams, ExpertStream, ExpertTiles, Route, RouteParams,
    SortPairs, SortPairsParams,
};
use crate::model::{DeviceExperts, FeedForward};
use half::bf16;
use oasis_models::spec::DecoderSpec;

/// Most pairs an expert, on average, that are streamed. On an H200, with 128 experts of 2048 x 768: 328 us for 16 pairs an
/// expert, where tiles take 379 us for 32.
const STREAMED_PAIRS: usize = 24;

/// A mixture that the device runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertShape {
    experts: usize,
    top: usize,
    hidden: usize,
    inner: usize,
    normalize: bool,
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
    fn layers(self) -> [ExpertLayer; 2] {
        let Self { experts, hidden, inner, .. } = self;
        let layer = |out, inner, gated| ExpertLayer { experts, out, inner, gated };
        [layer(inner, hidden, true), layer(hidden, inner, false)]
    }

    fn streamed(self, rows: usize) -> bool {
        rows * self.top <= STREAMED_PAIRS * self.experts
    }

    /// Bytes of what the experts of at most `rows` rows give: f32 where they are streamed, else bf16.
    fn part_bytes(self, rows: usize) -> usize {
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
    route: Kernel<Route>,
    sort: Kernel<SortPairs>,
    stream: [Kernel<ExpertStream>; 2],
    tiles: [Kernel<ExpertTiles>; 2],
    /// Of f32 parts, and of bf16 parts.
    combine: [Kernel<Combine>; 2],
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
    logits: DeviceBuffer<f32>,
    /// i32 `[rows][top]`.
    expert: DeviceBuffer<i32>,
    /// f32 `[rows][top]`.
    weight: DeviceBuffer<f32>,
    /// i32 `[layers][experts + 1]`: pairs of lower experts.
    start: DeviceBuffer<i32>,
    /// i32 `[pairs]`.
    pair_row: DeviceBuffer<i32>,
    /// i32 `[rows][top]`.
    pair_at: DeviceBuffer<i32>,
    /// bf16 `[pairs][inner]`.
    inner: DeviceBuffer<bf16>,
    /// f32 or bf16 `[pairs][hidden]`.
    parts: DeviceBuffer<u8>,
    experts: usize,
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

/// Rows that pass a mixture.
pub(super) struct Routed<'a> {
    pub memory: &'a ExpertMemory,
    pub layer: usize,
    pub rows: usize,
    /// Rows of the router's product, and rows that there is room for.
    pub product: (usize, usize),
    /// i32 `[rows / queries]`, below 0 for padding; none where there is no padding.
    pub position: Address,
    pub queries: usize,
    /// bf16 `[rows][hidden]`.
    pub x: Address,
    /// bf16 `[rows][hidden]`, what the experts' sum is added to; may be `out`; none where there is nothing.
    pub base: Address,
    /// bf16 `[rows][hidden]`. Written.
    pub out: Address,
}

impl Parts {
    /// Feed-forward part of a step's rows, from their norms to what is added to the residual.
    pub fn feed_forward(
        &self,
        work: &Work<'_>,
        activations: &Activations,
        (rows, layer): (usize, usize),
        position: Address,
    ) -> Result<(), DeviceError> {
        let experts = match &self.model.layers[layer].mlp {
            FeedForward::Dense(mlp) => return self.mlp(work, activations, rows, mlp),
            FeedForward::Experts(experts) => experts,
        };
        let memory = self.memory.experts.as_ref().expect("a model with experts has memory for them");
        let routed = Routed {
            memory,
            layer,
            rows,
            product: (rows, activations.rows),
            position,
            queries: self.extent.queries,
            x: activations.normed.address(),
            base: Address::NONE,
            out: activations.added.address(),
        };
        self.mixture(work, experts, &routed)
    }

    /// Routes rows to experts and adds up what they give.
    pub fn mixture(&self, work: &Work<'_>, experts: &DeviceExperts, routed: &Routed<'_>) -> Result<(), DeviceError> {
        let programs = self.programs.experts.as_ref().expect("a model with experts has kernels for them");
        let (Routed { memory, rows, .. }, shape) = (routed, programs.shape);
        let start = memory.start.address().offset(routed.layer * (shape.experts + 1) * 4);
        self.linear(work, routed.product, &experts.router, routed.x, memory.logits.address(), Output::F32)?;
        let route = RouteParams {
            logits: memory.logits.address(),
            position: routed.position,
            expert: memory.expert.address(),
            weight: memory.weight.address(),
            rows: *rows as i32,
            queries: routed.queries as i32,
            normalize: i32::from(shape.normalize),
        };
        let sort = SortPairsParams {
            expert: memory.expert.address(),
            start,
            pair_row: memory.pair_row.address(),
            pair_at: memory.pair_at.address(),
            rows: *rows as i32,
            top: shape.top as i32,
        };
        let ctas = Route { experts: shape.experts, top: shape.top }.ctas(*rows);
        // SAFETY: the memory has room for all rows and their pairs.
        unsafe {
            programs.route.launch(work.stream, (ctas, 1), &route)?;
            programs.sort.launch(work.stream, (shape.experts as u32, 1), &sort)?;
        }
        let (inner, parts) = (memory.inner.address(), memory.parts.address());
        let streamed = shape.streamed(*rows);
        let operands = [(routed.x, &experts.gate_up, inner), (inner, &experts.down, parts)];
        for (index, (x, weights, out)) in operands.into_iter().enumerate() {
            let (layer, pairs) = (shape.layers()[index], rows * shape.top);
            let params =
                ExpertParams { x, weights: weights.address(), start, pair_row: memory.pair_row.address(), out };
            // SAFETY: starts and rows of pairs were written above; `inner` and `parts` have room for all pairs.
            unsafe {
                if streamed {
                    let grid = (ExpertStream(layer).ctas(pairs), 1);
                    programs.stream[index].launch(work.stream, grid, &params)?;
                } else {
                    let grid = (ExpertTiles(layer).ctas(pairs, self.device.facts.multiprocessors), 1);
                    programs.tiles[index].launch(work.stream, grid, &params)?;
                }
            }
        }
        let combine = CombineParams {
            parts,
            pair_at: memory.pair_at.address(),
            weight: memory.weight.address(),
            base: routed.base,
            out: routed.out,
            hidden: shape.hidden as i32,
        };
        // SAFETY: callers give room for all rows; a row's CTA alone reads and writes it.
        unsafe { programs.combine[usize::from(!streamed)].launch(work.stream, (*rows as u32, 1), &combine) }
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
