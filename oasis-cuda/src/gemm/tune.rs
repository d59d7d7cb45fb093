//! Times algorithms on scratch memory and keeps the fastest.

use super::cache::Choice;
use super::library::{Library, Problem, check};
use super::{GemmOptions, GemmShape, Operands};
use crate::device::{Device, DeviceBuffer, DeviceError, Priority, Stream};
use crate::kernels::Address;
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
}

impl Scratch {
    /// Scratch memory for `shape`, out of `old` where that is large enough.
    fn of(old: Option<Self>, device: &Device, options: &GemmOptions, shape: &GemmShape) -> Result<Self, DeviceError> {
        let (random, y) = (POOL.max(shape.w_bytes()).max(shape.x_bytes()), shape.y_bytes());
        match old {
            Some(old) if old.random.bytes() >= random && old.y.bytes() >= y => Ok(old),
            old => {
                // Freed first: there may be no room for both.
                drop(old);
                Ok(Self {
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

/// `bytes` of random bf16 numbers.
fn noise(device: &Device, bytes: usize) -> Result<DeviceBuffer<u16>, DeviceError> {
    const BLOCK: usize = 4 << 20;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let numbers: Vec<u16> = (0..BLOCK)
        .map(|_| {
            // Xorshift64.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let number = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            (number.to_bits() >> 16) as u16
        })
        .collect();
    let len = bytes.div_ceil(2).max(BLOCK);
    let mut buffer = device.zeros::<u16>(len)?;
    buffer.write(&numbers)?;
    let (start, mut filled) = (buffer.address(), BLOCK);
    while filled < len {
        let more = filled.min(len - filled);
        // SAFETY: both ranges are within the buffer and do not overlap.
        unsafe { result::memcpy_dtod_sync(start.offset(2 * filled).0, start.0, 2 * more) }
            .map_err(|error| DeviceError::new("filling scratch memory", error))?;
        filled += more;
    }
    device.synchronize()?;
    Ok(buffer)
}

/// An algorithm on the way to being chosen.
struct Candidate {
    problem: usize,
    algorithm: cublasLtMatmulAlgo_t,
    micros: f64,
}

struct Tuning<'a> {
    library: &'a Library,
    shape: &'a GemmShape,
    scratch: &'a Scratch,
    /// The product at each number of rows that is tried.
    problems: Vec<(usize, Problem)>,
    /// Products of one timing.
    launches: usize,
}

/// Chooses the fastest algorithm for `shape`; `scratch` is kept for the next one.
pub(super) fn choose(
    device: &Device,
    library: &Library,
    options: &GemmOptions,
    shape: &GemmShape,
    scratch: &mut Option<Scratch>,
) -> Result<Choice, DeviceError> {
    let suitable = Scratch::of(scratch.take(), device, options, shape)?;
    let scratch = &*scratch.insert(suitable);
    let problems = shape
        .paddings()
        .into_iter()
        .map(|rows| {
            let mut problem = Problem::new(shape, rows, options.multiprocessors())?;
            if shape.bias {
                problem.set_bias(scratch.random.address())?;
            }
            Ok((rows, problem))
        })
        .collect::<Result<Vec<_>, DeviceError>>()?;
    // About 300 microseconds, and more weights than the L2 holds.
    let cold = COLD.div_ceil(shape.w_bytes());
    let launches = cold.max((300.0 / shape.floor_micros()) as usize).clamp(1, 256);
    let tuning = Tuning { library, shape, scratch, problems, launches };
    tuning.choose(device, options)
}

impl Tuning<'_> {
    fn choose(&self, device: &Device, options: &GemmOptions) -> Result<Choice, DeviceError> {
        let mut candidates = Vec::new();
        for (index, (_, problem)) in self.problems.iter().enumerate() {
            for algorithm in problem.candidates(self.library, options.workspace_bytes, options.candidates)? {
                candidates.push(Candidate { problem: index, algorithm, micros: f64::INFINITY });
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
                let Candidate { problem, algorithm, micros } = candidate;
                return Ok(Choice { rows: self.problems[problem].0, algorithm: algorithm.data, micros });
            }
        }
        let problem = match refusal {
            Some(error) => format!("none of {found} algorithms works, the last because of: {error}"),
            None => format!("cuBLASLt {} has no algorithm for it", self.library.version),
        };
        Err(DeviceError::new(format!("choosing an algorithm for {:?}", self.shape), problem))
    }

    /// Least time of one product in microseconds, over `replays` runs of a graph of products.
    fn time(&self, device: &Device, candidate: &Candidate, replays: usize) -> Result<f64, DeviceError> {
        let stream = &self.scratch.stream;
        let graph = stream.capture(|| (0..self.launches).try_for_each(|launch| self.launch(candidate, launch)))?;
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
        let workspace = (scratch.workspace.address(), scratch.workspace.bytes());
        let stream = scratch.stream.handle().cast();
        let (_, problem) = &self.problems[candidate.problem];
        // SAFETY: the scratch memory is as large as the shape asks for, and nothing else uses it.
        let status = unsafe {
            problem.multiply(self.library, &candidate.algorithm, &operands, self.shape.accumulate, workspace, stream)
        };
        check(status, || "timing an algorithm".to_owned())
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
