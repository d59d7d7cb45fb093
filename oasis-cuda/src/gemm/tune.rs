//! Times algorithms on scratch memory and keeps the fastest.

use super::cache::{Algorithm, Choice};
use super::library::{Problem, check};
use super::streams::{Streamed, StreamedPlan};
use super::{GemmShape, Gemms, Operands};
use crate::device::{Device, DeviceBuffer, DeviceError, Kernel, Priority, Stream};
use crate::kernels::{AddNorm, AddNormParams, Address, LinearStream};
use crate::measure::random::noise;
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use cudarc::driver::result;

/// Random numbers are repeated over this many bytes at least, and weights rotate through them: more than any L2 holds.
const POOL: usize = 256 << 20;
/// Bytes of weights that one timing reads at least.
const COLD: usize = 128 << 20;
/// Algorithms that are timed a second time, more thoroughly.
const FINALISTS: usize = 4;

/// Memory to time on: what it holds has no meaning.
pub(super) struct Scratch {
    /// Random bf16 numbers from -1 to 1: weights, rows and bias.
    random: DeviceBuffer<u16>,
    y: DeviceBuffer<u8>,
    workspace: DeviceBuffer<u8>,
}

/// Bytes of [`Scratch`] for products of at most so many bytes of rows and of outputs, whatever their weights.
pub(super) fn scratch_bytes(x: usize, y: usize, workspace: usize) -> usize {
    POOL.max(x) + y + workspace
}

/// What comes before a product of few rows, as in a step: some ways to run it begin meanwhile.
struct Norm {
    kernel: Kernel<AddNorm>,
    rows: DeviceBuffer<u16>,
}

impl Norm {
    /// Elements of a row.
    const WIDTH: usize = 4096;

    fn new(gemms: &Gemms) -> Result<Self, DeviceError> {
        let rows = gemms.device.zeros(LinearStream::MOST_ROWS * Self::WIDTH)?;
        Ok(Self { kernel: gemms.streams.load(&AddNorm { hidden: Self::WIDTH })?, rows })
    }
}

impl Scratch {
    /// Scratch memory for `shape`, out of `old` where that is large enough.
    fn of(old: Option<Self>, gemms: &Gemms, shape: &GemmShape, weights: Weights) -> Result<Self, DeviceError> {
        let Gemms { device, options, .. } = gemms;
        let own = if weights.of(shape).is_some() { 0 } else { shape.w_bytes() };
        let (random, y, workspace) = (POOL.max(own).max(shape.x_bytes()), shape.y_bytes(), options.workspace_bytes);
        let is_enough =
            |old: &Self| old.random.bytes() >= random && old.y.bytes() >= y && old.workspace.bytes() >= workspace;
        match old {
            Some(old) if is_enough(&old) => Ok(old),
            old => {
                // Freed first: there may be no room for both.
                drop(old);
                let (random, y) = (noise(device, random)?, device.zeros(y)?);
                Ok(Self { random, y, workspace: device.zeros(workspace)? })
            }
        }
    }
}

/// An algorithm on the way to being chosen.
struct Candidate {
    way: Way,
    micros: f64,
}

enum Way {
    /// Of the library, for one of the numbers of rows that are tried.
    Library {
        problem: usize,
        algorithm: cublasLtMatmulAlgo_t,
    },
    Streamed(StreamedPlan),
}

struct Tuning<'a> {
    gemms: &'a Gemms,
    shape: &'a GemmShape,
    /// Weights to read in place of `scratch`.
    weights: Option<Address>,
    scratch: &'a Scratch,
    stream: Stream,
    norm: Option<Norm>,
    /// The product at each number of rows that is tried.
    problems: Vec<(usize, Problem)>,
    /// Products of one timing.
    launches: usize,
}

/// Weights that timings may read in place of scratch memory.
#[derive(Clone, Copy)]
pub(super) struct Weights(pub Address);

impl Weights {
    /// Those of `shape`, where they are so many that no L2 holds any from one run to the next.
    fn of(self, shape: &GemmShape) -> Option<Address> {
        Some(self.0).filter(|weights| *weights != Address::NONE && shape.w_bytes() > POOL)
    }
}

/// Chooses the fastest algorithm for `shape`; `scratch` is kept for the next one.
pub(super) fn choose(
    gemms: &Gemms,
    shape: &GemmShape,
    weights: Weights,
    scratch: &mut Option<Scratch>,
) -> Result<Choice, DeviceError> {
    let suitable = Scratch::of(scratch.take(), gemms, shape, weights)?;
    let scratch = &*scratch.insert(suitable);
    let stream = match &gemms.options.part {
        None => gemms.device.stream(Priority::Middle)?,
        Some(part) => part.stream(Priority::Middle)?,
    };
    let norm = if shape.rows <= gemms.options.stream_rows() { Some(Norm::new(gemms)?) } else { None };
    let problems = shape
        .paddings()
        .into_iter()
        .map(|rows| {
            let mut problem = Problem::new(shape, rows, gemms.options.multiprocessors())?;
            if shape.bias {
                problem.set_bias(scratch.random.address())?;
            }
            Ok((rows, problem))
        })
        .collect::<Result<Vec<_>, DeviceError>>()?;
    // About 300 microseconds, and more weights than the L2 holds.
    let cold = COLD.div_ceil(shape.w_bytes());
    let launches = cold.max((300.0 / shape.floor_micros()) as usize).clamp(1, 256);
    Tuning { gemms, shape, weights: weights.of(shape), scratch, stream, norm, problems, launches }.choose()
}

impl Tuning<'_> {
    fn choose(&self) -> Result<Choice, DeviceError> {
        let Gemms { device, library, streams, options, .. } = self.gemms;
        let mut candidates = Vec::new();
        let untimed = |way| Candidate { way, micros: f64::INFINITY };
        for (index, (_, problem)) in self.problems.iter().enumerate() {
            for algorithm in problem.candidates(library, options.workspace_bytes, options.candidates)? {
                candidates.push(untimed(Way::Library { problem: index, algorithm }));
            }
        }
        if self.shape.rows <= options.stream_rows() {
            for way in Streamed::candidates(self.shape, device.facts.multiprocessors as usize) {
                candidates.push(untimed(Way::Streamed(streams.plan(self.shape, way)?)));
            }
        }
        let found = candidates.len();
        let mut refusal = None;
        candidates.retain_mut(|candidate| match self.time(device, candidate, 3) {
            Ok(micros) => {
                candidate.micros = micros;
                true
            }
            Err(error) => {
                refusal = Some(error);
                false
            }
        });
        // A lost device answers every later call with an error.
        device.synchronize()?;
        candidates.sort_by(|a, b| a.micros.total_cmp(&b.micros));
        for candidate in candidates.iter_mut().take(FINALISTS) {
            candidate.micros = self.time(device, candidate, 8)?;
        }
        candidates.sort_by(|a, b| a.micros.total_cmp(&b.micros));
        for candidate in candidates {
            if self.repeats_itself(device, &candidate)? {
                let algorithm = match candidate.way {
                    Way::Library { problem, algorithm } => {
                        Algorithm::Library { rows: self.problems[problem].0, data: algorithm.data }
                    }
                    Way::Streamed(plan) => Algorithm::Streamed(plan.way),
                };
                return Ok(Choice { algorithm, micros: candidate.micros });
            }
        }
        let problem = match refusal {
            Some(error) => format!("none of {found} algorithms works, the last because of: {error}"),
            None => format!("cuBLASLt {} has no algorithm for it", library.version),
        };
        Err(DeviceError::new(format!("choosing an algorithm for {:?}", self.shape), problem))
    }

    /// Least time of one product in microseconds, over `replays` runs of a graph of products. Where our own kernels are
    /// tried, that of the norm before it is counted in.
    fn time(&self, device: &Device, candidate: &Candidate, replays: usize) -> Result<f64, DeviceError> {
        let stream = &self.stream;
        let graph = stream.capture(|| {
            (0..self.launches).try_for_each(|launch| {
                self.launch_norm()?;
                self.launch(candidate, launch)
            })
        })?;
        let (start, end) = (device.event()?, device.event()?);
        let mut best = f64::INFINITY;
        for replay in 0..=replays {
            stream.record(&start)?;
            // SAFETY: the scratch memory outlives the launches, which are waited for.
            unsafe { graph.launch(stream)? };
            stream.record(&end)?;
            stream.synchronize()?;
            // The first one warms up.
            if replay > 0 {
                best = best.min(start.micros_until(&end)? / self.launches as f64);
            }
        }
        Ok(best)
    }

    fn launch_norm(&self) -> Result<(), DeviceError> {
        let Some(Norm { kernel, rows }) = &self.norm else { return Ok(()) };
        let params = AddNormParams {
            residual: rows.address(),
            x: Address::NONE,
            weight: self.scratch.random.address(),
            out: rows.address(),
            hidden: Norm::WIDTH as i32,
            out_stride: Norm::WIDTH as i32,
            eps: 1e-6,
        };
        // SAFETY: there is room for so many rows, which nothing else uses.
        unsafe { kernel.launch(&self.stream, (self.shape.rows as u32, 1), &params) }
    }

    fn launch(&self, candidate: &Candidate, launch: usize) -> Result<(), DeviceError> {
        let scratch = self.scratch;
        let stride = self.shape.w_bytes().next_multiple_of(256);
        let copies = (scratch.random.bytes() / stride).max(1);
        let operands = Operands {
            x: scratch.random.address(),
            w: self.weights.unwrap_or_else(|| scratch.random.address().offset(launch % copies * stride)),
            y: scratch.y.address(),
            bias: Address::NONE,
        };
        match &candidate.way {
            Way::Streamed(plan) => {
                let operands = Operands { bias: scratch.random.address(), ..operands };
                // SAFETY: the scratch memory is as large as the shape asks for, and nothing else uses it; weights are read.
                unsafe { plan.run(&self.gemms.device, &self.stream, self.shape, &operands) }
            }
            Way::Library { problem, algorithm } => {
                let workspace = (scratch.workspace.address(), scratch.workspace.bytes());
                let (stream, accumulate) = (self.stream.handle().cast(), self.shape.accumulate);
                let (_, problem) = &self.problems[*problem];
                // SAFETY: as above.
                let status = unsafe {
                    problem.multiply(&self.gemms.library, algorithm, &operands, accumulate, workspace, stream)
                };
                check(status, || "timing an algorithm".to_owned())
            }
        }
    }

    /// Whether two runs give the same bits, at the start and at the end of `y`.
    fn repeats_itself(&self, device: &Device, candidate: &Candidate) -> Result<bool, DeviceError> {
        let scratch = self.scratch;
        let (all, window) = (self.shape.y_bytes(), self.shape.y_bytes().min(4 << 20));
        let run = || {
            // SAFETY: the range is within the buffer, which nothing uses at the moment.
            unsafe { result::memset_d8_sync(scratch.y.address().0, 0, all) }
                .map_err(|error| DeviceError::new("clearing scratch memory", error))?;
            device.synchronize()?;
            self.launch(candidate, 0)?;
            self.stream.synchronize()?;
            let mut bytes = vec![0_u8; 2 * window];
            let (first, last) = bytes.split_at_mut(window);
            for (part, offset) in [(first, 0), (last, all - window)] {
                // SAFETY: the range is within the buffer, and the product is done.
                unsafe { result::memcpy_dtoh_sync(part, scratch.y.address().offset(offset).0) }
                    .map_err(|error| DeviceError::new("reading scratch memory", error))?;
            }
            Ok::<_, DeviceError>(bytes)
        };
        Ok(run()? == run()?)
    }
}
