//! Linear layers: `y[rows][out] = x[rows][inner] . w[out][inner]^T`, everything row-major, sums in f32, by cuBLASLt or, for
//! few rows, by [`LinearStream`](crate::kernels::LinearStream).
//!
//! cuBLASLt's own first guess is often not its best: a [`GemmPlan`] is the fastest of several algorithms, timed once on
//! weights that are not in the cache, and remembered on disk for the same device, driver and library. Results are the
//! same bits from run to run: algorithms whose sums depend on the order of arrival are not asked for, and the winner has
//! shown it by running twice. They are not the same bits at another number of rows, where another algorithm may win.

pub(crate) mod cache;
mod library;
mod streams;
mod tune;

pub use streams::Streamed;

use crate::compile::user_cache;
use crate::device::{Device, DeviceBuffer, DeviceError, Partition, Stream};
use crate::kernels::Address;
use cache::{Algorithm, Choice, Key};
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use library::{Library, Problem, check};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use streams::{StreamedPlan, Streams};
use tune::{Scratch, Weights};

/// Type of a product's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Output {
    /// bf16, rounded once.
    Bf16,
    /// f32.
    F32,
}

/// A product.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GemmShape {
    /// Rows of `x` and `y`.
    pub rows: usize,
    /// Rows that `x` and `y` have memory for, at least `rows`. Up to 128 rows, a plan may compute some that were not
    /// asked for, where that is faster: they read and write the memory that lies there.
    pub room: usize,
    /// Elements of a row of `y`, a multiple of 8.
    pub out: usize,
    /// Elements of a row of `x` and of `w`, a multiple of 8.
    pub inner: usize,
    /// Elements of `y`.
    pub output: Output,
    /// Whether the product is added to what `y` holds.
    pub accumulate: bool,
    /// Whether a bias, bf16 `[out]`, is added to every row; for bf16 outputs only.
    pub bias: bool,
    /// Elements from one row of `x` to the next, a multiple of 8, at least `inner`.
    pub x_stride: usize,
    /// Elements from one row of `w` to the next, a multiple of 8, at least `inner`.
    pub w_stride: usize,
    /// Elements from one row of `y` to the next, a multiple of 8, at least `out`.
    pub y_stride: usize,
}

impl GemmShape {
    /// Every address is a multiple of this many bytes.
    pub const ALIGNMENT: u32 = 16;

    /// Rows without gaps, bf16 outputs, no bias, nothing added, no room for more rows.
    pub fn dense(rows: usize, out: usize, inner: usize) -> Self {
        Self {
            rows,
            room: rows,
            out,
            inner,
            output: Output::Bf16,
            accumulate: false,
            bias: false,
            x_stride: inner,
            w_stride: inner,
            y_stride: out,
        }
    }

    /// Least time in microseconds on an H200: weights over 4.5 TB/s of memory, or products over 790 TFLOP/s.
    pub fn floor_micros(&self) -> f64 {
        let products = 2.0 * self.rows as f64 * self.out as f64 * self.inner as f64;
        (self.w_bytes() as f64 / 4.5e6).max(products / 790e6)
    }

    fn check(&self) -> Result<(), DeviceError> {
        let wrong = |expected: &str, hint: &str| {
            Err(DeviceError::new(format!("planning {self:?}"), format!("expected {expected}")).hint(hint))
        };
        if self.rows == 0 || self.out == 0 || self.inner == 0 {
            return wrong("no dimension to be 0", "an empty batch has nothing to run");
        }
        if self.room < self.rows || self.x_stride < self.inner || self.w_stride < self.inner || self.y_stride < self.out
        {
            return wrong(
                "room >= rows, strides of x and w >= inner, y_stride >= out",
                "GemmShape::dense sets all four",
            );
        }
        if [self.out, self.inner, self.x_stride, self.w_stride, self.y_stride].iter().any(|elements| elements % 8 != 0)
        {
            return wrong("out, inner and strides to be multiples of 8", "pad rows with zeros");
        }
        if self.bias && self.output == Output::F32 {
            return wrong("no bias with f32 outputs", "bf16 outputs may have one");
        }
        Ok(())
    }

    /// Numbers of rows to try.
    fn paddings(&self) -> Vec<usize> {
        let mut rows = vec![self.rows];
        if self.rows <= 128 {
            rows.extend([8, 16, 32, 64].map(|multiple| self.rows.next_multiple_of(multiple)));
            rows.retain(|rows| *rows <= self.room);
            rows.dedup();
        }
        rows
    }

    fn w_bytes(&self) -> usize {
        self.out * self.w_stride * 2
    }

    fn x_bytes(&self) -> usize {
        self.room * self.x_stride * 2
    }

    fn y_bytes(&self) -> usize {
        let element = match self.output {
            Output::Bf16 => 2,
            Output::F32 => 4,
        };
        self.room * self.y_stride * element
    }
}

/// How algorithms are chosen.
#[derive(Clone)]
pub struct GemmOptions {
    /// Bytes of a [`Workspace`]. NVIDIA recommends 32 MiB on Hopper.
    pub workspace_bytes: usize,
    /// Multiprocessors to choose and time algorithms for; `None` takes all. Products are then run on its streams.
    pub part: Option<Arc<Partition>>,
    /// Algorithms that are timed for a shape and a number of rows.
    pub candidates: usize,
    /// Most rows for which this crate's own kernels are timed too, at most
    /// [`LinearStream::MOST_ROWS`](crate::kernels::LinearStream::MOST_ROWS); 0 for none. The default leaves out what is
    /// faster alone but not beside scans and gathers.
    pub stream_rows: usize,
    /// Folder where choices are remembered; `None` times at each start.
    pub cache: Option<PathBuf>,
}

impl Default for GemmOptions {
    fn default() -> Self {
        let cache = user_cache().map(|folder| folder.join("gemm"));
        Self { workspace_bytes: Self::WORKSPACE, part: None, candidates: 32, stream_rows: 16, cache }
    }
}

impl GemmOptions {
    const WORKSPACE: usize = 32 << 20;

    fn multiprocessors(&self) -> Option<u32> {
        self.part.as_ref().map(|part| part.multiprocessors())
    }

    /// Most rows for which our own kernels are tried; their clusters want the whole device.
    fn stream_rows(&self) -> usize {
        if self.part.is_none() { self.stream_rows } else { 0 }
    }
}

/// Memory that products use on the way. Every stream that runs products has its own.
pub struct Workspace(DeviceBuffer<u8>);

/// Addresses of a product, each aligned to [`GemmShape::ALIGNMENT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operands {
    /// bf16 `[room][x_stride]`.
    pub x: Address,
    /// bf16 `[out][w_stride]`.
    pub w: Address,
    /// bf16 or f32 `[room][y_stride]`. Written.
    pub y: Address,
    /// bf16 `[out]`; none where the shape has no bias.
    pub bias: Address,
}

/// A product and the algorithm for it.
pub struct GemmPlan {
    shape: GemmShape,
    micros: f64,
    way: Way,
}

enum Way {
    Library {
        rows: usize,
        algorithm: cublasLtMatmulAlgo_t,
        workspace: usize,
        /// The bias is set before each run.
        problem: Mutex<Problem>,
    },
    Streamed(StreamedPlan),
}

impl GemmPlan {
    /// The product.
    pub fn shape(&self) -> &GemmShape {
        &self.shape
    }

    /// Rows that a run computes.
    pub fn rows(&self) -> usize {
        match &self.way {
            Way::Library { rows, .. } => *rows,
            Way::Streamed(_) => self.shape.rows,
        }
    }

    /// How this crate's own kernel runs it; `None` where cuBLASLt does.
    pub fn streamed(&self) -> Option<Streamed> {
        match &self.way {
            Way::Library { .. } => None,
            Way::Streamed(plan) => Some(plan.way),
        }
    }

    /// Microseconds that a run took when the algorithm was chosen; of few rows, with a norm before it.
    pub fn micros(&self) -> f64 {
        self.micros
    }
}

/// Plans products on one device and runs them.
pub struct Gemms {
    device: Device,
    library: Library,
    streams: Streams,
    options: GemmOptions,
    plans: Mutex<HashMap<GemmShape, Arc<GemmPlan>>>,
    /// Shared by those who plan for parts of the device.
    scratch: Arc<Mutex<Option<Scratch>>>,
}

impl Gemms {
    /// Opens cuBLASLt.
    ///
    /// # Errors
    /// [`DeviceError`] where the library is missing or refuses the device.
    pub fn open(device: &Device, options: GemmOptions) -> Result<Self, DeviceError> {
        let library = Library::open(device)?;
        Ok(Self {
            device: device.clone(),
            library,
            streams: Streams::new(device),
            options,
            plans: Mutex::default(),
            scratch: Arc::default(),
        })
    }

    /// Plans and runs products on a part of the device. Timings take turns with those of `self` on the same memory.
    ///
    /// # Errors
    /// As [`Gemms::open`].
    pub fn on(&self, part: Arc<Partition>) -> Result<Self, DeviceError> {
        let options = GemmOptions { part: Some(part), ..self.options.clone() };
        Ok(Self { scratch: self.scratch.clone(), ..Self::open(&self.device, options)? })
    }

    /// Version of cuBLASLt, such as 130002.
    pub fn version(&self) -> usize {
        self.library.version
    }

    /// A workspace for one stream.
    ///
    /// # Errors
    /// [`DeviceError`] when there is not that much memory.
    pub fn workspace(&self) -> Result<Workspace, DeviceError> {
        self.device.zeros(self.options.workspace_bytes).map(Workspace)
    }

    /// The plan for `shape`. Where none is remembered it times algorithms for some milliseconds: the device should be
    /// idle, and have free memory for the operands and for 256 MiB, which [`Gemms::end_planning`] gives back.
    ///
    /// # Errors
    /// [`DeviceError`] for an impossible shape, without enough memory, or where no algorithm works.
    pub fn plan(&self, shape: &GemmShape) -> Result<Arc<GemmPlan>, DeviceError> {
        self.plan_by(shape, Weights(Address::NONE))
    }

    /// The same where there are weights of the shape already: timings read those that are more than 256 MiB, so that no
    /// memory is needed for others like them.
    ///
    /// # Safety
    /// `weights` are bf16 `[out][w_stride]`, aligned to [`GemmShape::ALIGNMENT`], and nothing writes them meanwhile.
    ///
    /// # Errors
    /// As [`Gemms::plan`].
    pub unsafe fn plan_with(&self, shape: &GemmShape, weights: Address) -> Result<Arc<GemmPlan>, DeviceError> {
        self.plan_by(shape, Weights(weights))
    }

    /// Bytes that plans need for a while, of products whose rows have at most `x` bytes and outputs `y`, where the weights
    /// are there already.
    pub fn planning_bytes(x: usize, y: usize) -> usize {
        tune::scratch_bytes(x, y, GemmOptions::WORKSPACE)
    }

    fn plan_by(&self, shape: &GemmShape, weights: Weights) -> Result<Arc<GemmPlan>, DeviceError> {
        // Held to the end: two threads that plan at once would disturb each other's timings.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(shape) {
            return Ok(plan.clone());
        }
        shape.check()?;
        self.device.bind()?;
        let key = self.key(shape);
        let stored = self.options.cache.as_ref().and_then(|folder| cache::get(folder, &key));
        let plan = match stored.and_then(|choice| self.build(shape, &choice).ok()) {
            Some(plan) => plan,
            None => {
                let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
                let choice = tune::choose(self, shape, weights, &mut scratch)?;
                if let Some(folder) = &self.options.cache {
                    // A cache that cannot be written costs time, not the run.
                    let _ = cache::put(folder, &key, &choice);
                }
                self.build(shape, &choice)?
            }
        };
        let plan = Arc::new(plan);
        plans.insert(shape.clone(), plan.clone());
        Ok(plan)
    }

    /// Gives back the memory that timing used.
    pub fn end_planning(&self) {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Queues a product on `stream`. It allocates nothing and waits for nothing, so it can be captured; other streams may
    /// run products, of the same plan too, at the same time.
    ///
    /// # Safety
    /// The operands have the plan's shape, `room` rows included, and stay valid until the work is done; `y` overlaps no
    /// other operand. No other work touches `y` or `workspace` meanwhile: a workspace is used on one stream.
    ///
    /// # Errors
    /// [`DeviceError`] when the product is refused; errors while it runs surface at the next synchronisation.
    pub unsafe fn run(
        &self,
        plan: &GemmPlan,
        stream: &Stream,
        workspace: &Workspace,
        operands: &Operands,
    ) -> Result<(), DeviceError> {
        self.device.bind()?;
        let (algorithm, needed, problem) = match &plan.way {
            Way::Library { algorithm, workspace, problem, .. } => (algorithm, *workspace, problem),
            // SAFETY: the caller's.
            Way::Streamed(streamed) => return unsafe { streamed.run(&self.device, stream, &plan.shape, operands) },
        };
        let bytes = workspace.0.bytes();
        if bytes < needed {
            let problem = format!("expected a workspace of {needed} bytes, found {bytes}");
            return Err(DeviceError::new(format!("running {:?}", plan.shape), problem)
                .hint("plan, workspace and run belong to the same Gemms"));
        }
        let mut problem = problem.lock().unwrap_or_else(PoisonError::into_inner);
        if plan.shape.bias {
            problem.set_bias(operands.bias)?;
        }
        let (workspace, stream) = ((workspace.0.address(), bytes), stream.handle().cast());
        // SAFETY: the caller's; the workspace is large enough.
        let status =
            unsafe { problem.multiply(&self.library, algorithm, operands, plan.shape.accumulate, workspace, stream) };
        check(status, || format!("running {:?}", plan.shape))
    }

    fn build(&self, shape: &GemmShape, choice: &Choice) -> Result<GemmPlan, DeviceError> {
        let way = match &choice.algorithm {
            Algorithm::Library { rows, data } => {
                let problem = Problem::new(shape, *rows, self.options.multiprocessors())?;
                let algorithm = cublasLtMatmulAlgo_t { data: *data };
                let workspace = problem.workspace(&self.library, &algorithm)?;
                Way::Library { rows: *rows, algorithm, workspace, problem: Mutex::new(problem) }
            }
            Algorithm::Streamed(way) => Way::Streamed(self.streams.plan(shape, *way)?),
        };
        Ok(GemmPlan { shape: shape.clone(), micros: choice.micros, way })
    }

    fn key(&self, shape: &GemmShape) -> Key {
        Key {
            device: self.device.facts.name.clone(),
            driver: crate::probe::driver_version(),
            cublaslt: self.library.version,
            multiprocessors: self.options.multiprocessors(),
            workspace: self.options.workspace_bytes,
            candidates: self.options.candidates,
            streams: (self.options.stream_rows(), streams::VERSION),
            shape: shape.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_padded_only_where_there_is_room_and_little_work() {
        let shape = |rows, room| GemmShape { room, ..GemmShape::dense(rows, 64, 64) };
        assert_eq!(shape(2, 2).paddings(), [2]);
        assert_eq!(shape(2, 20).paddings(), [2, 8, 16]);
        assert_eq!(shape(16, 64).paddings(), [16, 32, 64]);
        assert_eq!(shape(129, 256).paddings(), [129]);
    }

    #[test]
    fn impossible_shapes_are_refused_with_what_was_expected() {
        let dense = GemmShape::dense(4, 64, 64);
        assert_eq!(dense.check(), Ok(()));
        let wrong = [
            GemmShape { rows: 0, ..dense.clone() },
            GemmShape { room: 3, ..dense.clone() },
            GemmShape { x_stride: 60, ..dense.clone() },
            GemmShape { w_stride: 60, ..dense.clone() },
            GemmShape { out: 63, ..dense.clone() },
            GemmShape { y_stride: 66, ..dense.clone() },
            GemmShape { bias: true, output: Output::F32, ..dense.clone() },
        ];
        for shape in wrong {
            let error = shape.check().expect_err("the shape is impossible");
            assert!(error.problem.starts_with("expected ") && error.hint.is_some(), "{error}");
        }
    }
}
