//! What all checks share: the device, random numbers, comparisons, timing, results.

use half::bf16;
use oasis_core::policy::{DeviceCode, SelectorSpec, split_mix64};
use oasis_cuda::compile::Compiler;
use oasis_cuda::device::{Device, DeviceBuffer, DeviceError, Priority, Stream};
use oasis_cuda::kernels::KernelSpec;
use oasis_cuda::measure::kernels::{self, KernelBench, KernelTime};
use serde::Serialize;
use std::time::{SystemTime, UNIX_EPOCH};

pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A comparison with the reference.
#[derive(Serialize)]
struct Check {
    name: String,
    /// `|got - want| / |want|` over all elements; for exact comparisons the number of differences.
    error: f64,
    limit: f64,
}

#[derive(Serialize)]
pub struct Results<'a> {
    device: &'a str,
    unix_time: u64,
    seed: u64,
    memory_read_tb_s: f64,
    checks: &'a [Check],
    timings: &'a [KernelTime],
}

pub struct Rig {
    pub device: Device,
    pub compiler: Compiler,
    pub stream: Stream,
    pub random: Random,
    pub seed: u64,
    /// Bytes a microsecond.
    pub ceiling: f64,
    checks: Vec<Check>,
    timings: Vec<KernelTime>,
}

impl Rig {
    pub fn new() -> Outcome<Self> {
        let device = Device::open(0)?;
        let compiler = device.compiler()?;
        let stream = device.stream(Priority::Middle)?;
        let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
        let (checks, timings) = (Vec::new(), Vec::new());
        Ok(Self { device, compiler, stream, random: Random(seed), seed, ceiling: 0.0, checks, timings })
    }

    /// Records how far `got` is from `want`; a NaN anywhere fails.
    pub fn compare(&mut self, name: impl Into<String>, got: impl IntoIterator<Item = f64>, want: &[f64], limit: f64) {
        let (mut difference, mut size, mut count) = (0.0, 0.0, 0);
        for (got, want) in got.into_iter().zip(want) {
            difference += (got - want).powi(2);
            size += want.powi(2);
            count += 1;
        }
        let error = if count == want.len() { (difference / size.max(1e-30)).sqrt() } else { f64::NAN };
        self.judge(Check { name: name.into(), error, limit });
    }

    fn judge(&mut self, check: Check) {
        let verdict = if check.error <= check.limit { "ok  " } else { "FAIL" };
        println!("{verdict} {:<78} {:.1e} <= {:.0e}", check.name, check.error, check.limit);
        self.checks.push(check);
    }

    /// Records how many elements differ.
    pub fn same<T: PartialEq>(&mut self, name: impl Into<String>, got: &[T], want: &[T]) {
        let different = got.iter().zip(want).filter(|(got, want)| got != want).count() + got.len().abs_diff(want.len());
        self.judge(Check { name: name.into(), error: different as f64, limit: 0.0 });
    }

    pub fn passed(&self) -> bool {
        self.checks.iter().all(|check| check.error <= check.limit)
    }

    /// Median time in microseconds of one of `launches` launches, captured as one graph.
    ///
    /// # Safety
    /// What is launched is valid for as long as this runs.
    pub unsafe fn micros(&self, launches: usize, launch: impl Fn(usize) -> Result<(), DeviceError>) -> Outcome<f64> {
        // SAFETY: the caller's.
        Ok(unsafe { kernels::micros(&self.device, &self.stream, launches, launch)? })
    }

    pub fn push(&mut self, time: KernelTime) {
        self.timings.push(time);
    }

    pub fn record(&mut self, kernel: impl Into<String>, micros: f64, floor_micros: f64, figure: impl Into<String>) {
        let floor = Some(floor_micros).filter(|floor| *floor > 0.0);
        self.push(KernelTime::new(kernel, micros, floor, figure));
    }

    /// Records a kernel that is bound by `bytes` of device memory.
    pub fn record_bytes(&mut self, kernel: impl Into<String>, micros: f64, bytes: f64) {
        self.record(kernel, micros, bytes / self.ceiling, format!("{:.3} TB/s", bytes / micros / 1e6));
    }

    /// What times the kernels of steps; how fast a plain kernel reads memory is measured first.
    pub fn bench(&mut self) -> Outcome<KernelBench> {
        let bench = KernelBench::new(&self.device)?;
        self.ceiling = bench.memory_read / 1e6;
        println!("memory read {:.3} TB/s", self.ceiling / 1e6);
        Ok(bench)
    }

    pub fn print_summary(&self) {
        // NaN is no error below a limit: count what passes.
        let passed = self.checks.iter().filter(|check| check.error <= check.limit).count();
        println!("{} checks, {} failed", self.checks.len(), self.checks.len() - passed);
    }

    pub fn print_timings(&self) {
        println!("{:<64} {:>10} {:>10} {:>6}", "kernel", "us", "floor us", "ratio");
        for KernelTime { kernel, micros, floor_micros, ratio, figure } in &self.timings {
            let (floor, ratio) = (floor_micros.unwrap_or(0.0), ratio.unwrap_or(0.0));
            println!("{kernel:<64} {micros:>10.2} {floor:>10.2} {ratio:>6.3}  {figure}");
        }
    }

    pub fn results(&self) -> Results<'_> {
        Results {
            device: &self.device.facts.name,
            unix_time: self.seed / 1_000_000_000,
            seed: self.seed,
            memory_read_tb_s: self.ceiling / 1e6,
            checks: &self.checks,
            timings: &self.timings,
        }
    }
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        split_mix64(&mut self.0)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// From -2 to 2.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 22) as f32 - 2.0
    }

    /// The numbers below `count` in random order.
    pub fn shuffled(&mut self, count: usize) -> Vec<i32> {
        let mut numbers: Vec<i32> = (0..count as i32).collect();
        for i in (1..count).rev() {
            numbers.swap(i, self.below(i + 1));
        }
        numbers
    }

    pub fn bf16s(&mut self, count: usize) -> Vec<bf16> {
        (0..count).map(|_| bf16::from_f32(self.float())).collect()
    }
}

/// Sums of entries before each request, one more than there are requests.
pub fn starts(units: &[usize]) -> Vec<i32> {
    let sums = units.iter().scan(0, |sum, units| {
        *sum += *units as i32;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

pub fn floats(values: &[bf16]) -> impl Iterator<Item = f64> + '_ {
    values.iter().map(|value| value.to_f64())
}

/// The element at a byte offset.
pub fn at(bytes: &[bf16], offset: usize) -> f64 {
    bytes[offset / 2].to_f64()
}

/// Elements of a buffer whose bytes are all `0xff`: NaN in every type.
pub fn poisoned<T: bytemuck::Pod>(device: &Device, len: usize) -> Result<DeviceBuffer<T>, DeviceError> {
    let mut buffer = device.zeros(len)?;
    buffer.fill(0xff)?;
    Ok(buffer)
}

pub fn selector(spec: &dyn SelectorSpec) -> Outcome<DeviceCode> {
    Ok(spec.build()?.device_code().ok_or("the selector has no device code")?)
}

/// A kernel's entry point and a few numbers, for names of checks.
pub fn name<S: KernelSpec>(shape: &str) -> String {
    format!("{} {shape}", S::ENTRY)
}
