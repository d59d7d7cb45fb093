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
    stream: Stream,
    /// What comes before a product of few rows, as in a step: some ways to run it begin meanwhile.
    norm: Option<(Kernel<AddNorm>, DeviceBuffer<u16>)>,
}

/// Elements of a row of that norm.
const NORMED: usize = 4096;

impl Scratch {
    /// Scratch memory for `shape`, out of `old` where that is large enough.
    fn of(old: Option<Self>, gemms: &Gemms, shape: &GemmShape) -> Result<Self, DeviceError> {
        let Gemms { device, options, streams, .. } = gemms;
        let (random, y) = (POOL.max(shape.w_bytes()).max(shape.x_bytes()), shape.y_bytes());
        match old {
            Some(old) if old.random.bytes() >= random && old.y.bytes() >= y => Ok(old),
            old => {
                // Freed first: there may be no room for both.
                drop(old);
                let norm = || -> Result<_, DeviceError> {
                    let rows = device.zeros(LinearStream::MOST_ROWS * NORMED)?;
                    Ok((streams.load(&AddNorm { hidden: NORMED })?, rows))
                };
                Ok(Self {
                    norm: if options.stream_rows() > 0 { Some(norm()?) } else { None },
                    random: noise(device, random)?,
                    y: device.zeros(y)?,
                    workspace: device.zeros(options.workspace_bytes)?,
                    stream: match &options.part {
                        None => device.stream(Priority::Middle)?,
                        Some(part) => part.stream(Priority::Middle)?,
                    },
                })
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
    scratch: &'a Scratch,
    /// The product at each number of rows that is tried.
    problems: Vec<(usize, Problem)>,
    /// Products of one timing.
    launches: usize,
}

/// Chooses the fastest algorithm for `shape`; `scratch` is kept for the next one.
pub(super) fn choose(gemms: &Gemms, shape: &GemmShape, scratch: &mut Option<Scratch>) -> Result<Choice, DeviceError> {
    let suitable = Scratch::of(scratch.take(), gemms, shape)?;
    let scratch = &*scratch.insert(suitable);
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
    Tuning { gemms, shape, scratch, problems, launches }.choose()
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
        let stream = &self.scratch.stream;
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
        let Scratch { norm: Some((kernel, rows)), stream, random, .. } = self.scratch else { return Ok(()) };
        if self.shape.rows > self.gemms.options.stream_rows() {
            return Ok(());
        }
        let params = AddNormParams {
            residual: rows.address(),
            x: Address::NONE,
            weight: random.address(),
            out: rows.address(),
            hidden: NORMED as i32,
            out_stride: NORMED as i32,
            eps: 1e-6,
        };
        // SAFETY: there is room for so many rows, which nothing else uses.
        unsafe { kernel.launch(stream, (self.shape.rows as u32, 1), &params) }
    }

    fn launch(&self, candidate: &Candidate, launch: usize) -> Result<(), DeviceError> {
        let scratch = self.scratch;
        let stride = self.shape.w_bytes().next_multiple_of(256);
        let copies = (scratch.random.bytes() / stride).max(1);
        let operands = Operands {
            x: scratch.random.address(),
            w: scratch.random.address().offset(launch % copies * stride),
            y: scratch.y.address(),
            bias: Address::NONE,
        };
        match &candidate.way {
            Way::Streamed(plan) => {
                let operands = Operands { bias: scratch.random.address(), ..operands };
                // SAFETY: the scratch memory is as large as the shape asks for, and nothing else uses it.
                unsafe { plan.run(&self.gemms.device, &scratch.stream, self.shape, &operands) }
            }
            Way::Library { problem, algorithm } => {
                let workspace = (scratch.workspace.address(), scratch.workspace.bytes());
                let (stream, accumulate) = (scratch.stream.handle().cast(), self.shape.accumulate);
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
            scratch.stream.synchronize()?;
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
