//! Linear layers.

use crate::rig::{Outcome, Rig, floats, poisoned};
use half::bf16;
use oasis_cuda::device::{Device, DeviceBuffer, DeviceError, Priority};
use oasis_cuda::gemm::{GemmOptions, GemmPlan, GemmShape, Gemms, Operands, Output, Workspace};
use oasis_cuda::kernels::Address;
use oasis_cuda::measure::kernels::KernelBench;

/// Layers as (name, out, inner, output).
const SMOL: [(&str, usize, usize, Output); 5] = [
    ("SmolLM2 qkv", 960, 576, Output::Bf16),
    ("SmolLM2 o", 576, 576, Output::Bf16),
    ("SmolLM2 gate_up", 3072, 576, Output::Bf16),
    ("SmolLM2 down", 576, 1536, Output::Bf16),
    ("SmolLM2 lm_head", 49_152, 576, Output::F32),
];
const QWEN: [(&str, usize, usize, Output); 5] = [
    ("Qwen3-8B qkv", 6144, 4096, Output::Bf16),
    ("Qwen3-8B o", 4096, 4096, Output::Bf16),
    ("Qwen3-8B gate_up", 24_576, 4096, Output::Bf16),
    ("Qwen3-8B down", 4096, 12_288, Output::Bf16),
    ("Qwen3-8B lm_head", 151_936, 4096, Output::F32),
];
/// Prompts are long, but only their last rows have logits.
const PREFILL: usize = 8192;

/// Random numbers of a prime count, repeated: no two rows are alike, and the host keeps few.
pub struct Cycle {
    numbers: Vec<bf16>,
    pub device: DeviceBuffer<bf16>,
}

impl Cycle {
    pub fn new(rig: &mut Rig, len: usize) -> Outcome<Self> {
        let numbers = rig.random.bf16s(4_194_301);
        let all: Vec<bf16> = numbers.iter().cycle().take(len).copied().collect();
        Ok(Self { device: rig.device.upload(&all)?, numbers })
    }

    pub fn at(&self, index: usize) -> f64 {
        self.numbers[index % self.numbers.len()].to_f64()
    }

    /// The product of `x` and the numbers from `start` on.
    pub fn dot(&self, start: usize, x: &[f64]) -> f64 {
        let numbers = self.numbers[start % self.numbers.len()..].iter().chain(self.numbers.iter().cycle());
        x.iter().zip(numbers).map(|(x, number)| x * number.to_f64()).sum()
    }
}

/// What all products read.
struct Data {
    gemms: Gemms,
    workspace: Workspace,
    x: Cycle,
    w: Cycle,
}

impl Data {
    fn new(rig: &mut Rig, options: GemmOptions) -> Outcome<Self> {
        let gemms = Gemms::open(&rig.device, options)?;
        let workspace = gemms.workspace()?;
        let x = Cycle::new(rig, PREFILL * 12_288)?;
        Ok(Self { gemms, workspace, x, w: Cycle::new(rig, 151_936 * 4096)? })
    }

    fn operands(&self, y: Address, bias: bool) -> Operands {
        let bias = if bias { self.x.device.address() } else { Address::NONE };
        Operands { x: self.x.device.address(), w: self.w.device.address(), y, bias }
    }

    /// The element of the product, without what `y` held before.
    fn want(&self, shape: &GemmShape, row: usize, out: usize) -> f64 {
        let (x, w) = (row * shape.x_stride, out * shape.inner);
        let sum: f64 = (0..shape.inner).map(|i| self.x.at(x + i) * self.w.at(w + i)).sum();
        sum + if shape.bias { self.x.at(out) } else { 0.0 }
    }
}

/// `y` as numbers.
enum Y {
    Bf16(DeviceBuffer<bf16>),
    F32(DeviceBuffer<f32>),
}

impl Y {
    /// Everything is NaN, or everything a number that sums start from.
    fn new(device: &Device, shape: &GemmShape) -> Result<Self, DeviceError> {
        let len = shape.room * shape.y_stride;
        Ok(match shape.output {
            Output::Bf16 if shape.accumulate => Self::Bf16(device.upload(&vec![bf16::from_f32(HELD); len])?),
            Output::Bf16 => Self::Bf16(poisoned(device, len)?),
            Output::F32 => Self::F32(poisoned(device, len)?),
        })
    }

    fn address(&self) -> Address {
        match self {
            Self::Bf16(y) => y.address(),
            Self::F32(y) => y.address(),
        }
    }

    fn read(&self) -> Result<Vec<f32>, DeviceError> {
        Ok(match self {
            Self::Bf16(y) => y.read()?.into_iter().map(bf16::to_f32).collect(),
            Self::F32(y) => y.read()?,
        })
    }
}

/// What `y` holds where it is added to.
const HELD: f32 = 40.0;

pub fn check(rig: &mut Rig) -> Outcome<()> {
    let mut data = Data::new(rig, GemmOptions { cache: None, candidates: 8, ..GemmOptions::default() })?;
    println!("cuBLASLt {}", data.gemms.version());
    for (name, out, inner, output) in SMOL.into_iter().chain(QWEN) {
        for rows in [1, 2, 16, 64, 128, 200, PREFILL] {
            if rows == PREFILL && output == Output::F32 {
                continue;
            }
            let shape = GemmShape { output, ..GemmShape::dense(rows, out, inner) };
            check_shape(rig, &data, name, &shape)?;
        }
    }
    for rows in [3, 100, 700] {
        let dense = GemmShape { room: 1024, ..GemmShape::dense(rows, 4096, 1536) };
        let wide = GemmShape { x_stride: 3072, y_stride: 6144, ..dense.clone() };
        let bias = GemmShape { bias: true, ..dense.clone() };
        let added = GemmShape { accumulate: true, ..dense.clone() };
        let all = GemmShape { bias: true, accumulate: true, ..wide.clone() };
        for (name, shape) in [("strided", wide), ("bias", bias), ("added", added), ("all of these", all)] {
            check_shape(rig, &data, name, &shape)?;
        }
    }
    // Keys and values of a prompt, queries of its last token.
    for (rows, out) in [(16, 2048), (1024, 2048), (16, 4096)] {
        let part = GemmShape { y_stride: 6144, ..GemmShape::dense(rows, out, 4096) };
        check_shape(rig, &data, "part of Qwen3-8B qkv", &part)?;
    }
    check_streams(rig, &data)?;
    check_cache(rig)?;
    let part = Some(rig.device.partition(64)?);
    data.gemms = Gemms::open(&rig.device, GemmOptions { cache: None, part, ..Default::default() })?;
    check_shape(rig, &data, "on 64 multiprocessors", &GemmShape::dense(64, 6144, 4096))
}

fn check_shape(rig: &mut Rig, data: &Data, name: &str, shape: &GemmShape) -> Outcome<()> {
    let plan = data.gemms.plan(shape)?;
    let run = || -> Outcome<Vec<f32>> {
        let y = Y::new(&rig.device, shape)?;
        // SAFETY: the operands have the plan's shape.
        unsafe { data.gemms.run(&plan, &rig.stream, &data.workspace, &data.operands(y.address(), shape.bias))? };
        Ok(y.read()?)
    };
    let (got, again) = (run()?, run()?);
    let name = format!("gemm {name}, {} rows ({})", shape.rows, plan.rows());
    let corners = [(0, 0), (0, shape.out - 1), (shape.rows - 1, 0), (shape.rows - 1, shape.out - 1)];
    let samples: Vec<(usize, usize)> =
        (0..252).map(|_| (rig.random.below(shape.rows), rig.random.below(shape.out))).chain(corners).collect();
    let held = if shape.accumulate { f64::from(HELD) } else { 0.0 };
    let want: Vec<f64> = samples.iter().map(|(row, out)| held + data.want(shape, *row, *out)).collect();
    let limit = if shape.output == Output::F32 { 1e-4 } else { 4e-3 };
    let sampled = samples.iter().map(|(row, out)| f64::from(got[row * shape.y_stride + out]));
    rig.compare(&name, sampled, &want, limit);
    let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
    rig.same(format!("{name}: twice the same"), &bits(&again), &bits(&got));
    let missing = got.chunks(shape.y_stride).take(shape.rows).flat_map(|row| &row[..shape.out]).filter(|y| y.is_nan());
    rig.same(format!("{name}: every element written"), &[missing.count()], &[0]);
    if shape.y_stride > shape.out {
        let old = if shape.accumulate { HELD } else { f32::NAN };
        let gaps = got.chunks(shape.y_stride).flat_map(|row| &row[shape.out..]);
        let touched = gaps.filter(|y| y.is_nan() != old.is_nan() || (!old.is_nan() && **y != old)).count();
        rig.same(format!("{name}: gaps left alone"), &[touched], &[0]);
    }
    Ok(())
}

/// Two streams at once, one plan, two biases.
fn check_streams(rig: &mut Rig, data: &Data) -> Outcome<()> {
    let shape = GemmShape { bias: true, ..GemmShape::dense(64, 4096, 4096) };
    let plan = data.gemms.plan(&shape)?;
    let (stream, workspace) = (rig.device.stream(Priority::Middle)?, data.gemms.workspace()?);
    let outputs: Vec<DeviceBuffer<bf16>> =
        (0..2).map(|_| poisoned(&rig.device, shape.rows * shape.out)).collect::<Result<_, _>>()?;
    let shift = 4096;
    for _ in 0..20 {
        for (index, (stream, workspace)) in [(&rig.stream, &data.workspace), (&stream, &workspace)].iter().enumerate() {
            let mut operands = data.operands(outputs[index].address(), true);
            operands.bias = operands.bias.offset(index * shift * 2);
            // SAFETY: the operands have the plan's shape, each stream has its workspace and its output.
            unsafe { data.gemms.run(&plan, stream, workspace, &operands)? };
        }
    }
    for (index, y) in outputs.iter().enumerate() {
        let got = y.read()?;
        let want: Vec<f64> = (0..got.len())
            .step_by(997)
            .map(|i| {
                let out = i % shape.out;
                data.want(&shape, i / shape.out, out) - data.x.at(out) + data.x.at(index * shift + out)
            })
            .collect();
        rig.compare(format!("gemm on two streams, {index}"), floats(&got).step_by(997), &want, 4e-3);
    }
    Ok(())
}

/// A second start finds the first one's choices.
fn check_cache(rig: &mut Rig) -> Outcome<()> {
    let folder = std::env::temp_dir().join(format!("oasis-gemm-{}", rig.seed));
    let options = GemmOptions { cache: Some(folder.clone()), ..GemmOptions::default() };
    let shape = GemmShape::dense(16, 4096, 4096);
    let mut times = Vec::new();
    for _ in 0..2 {
        times.push(Gemms::open(&rig.device, options.clone())?.plan(&shape)?.micros());
    }
    let files = std::fs::read_dir(&folder)?.count();
    std::fs::remove_dir_all(&folder)?;
    // The time travels with the choice: a second timing would give another.
    rig.same("gemm: choices are remembered", &[times[0]], &[times[1]]);
    rig.same("gemm: one file a shape", &[files], &[1]);
    Ok(())
}

pub fn time(rig: &mut Rig, _: &KernelBench) -> Outcome<()> {
    let data = Data::new(rig, GemmOptions { cache: None, ..GemmOptions::default() })?;
    let many = Gemms::open(&rig.device, GemmOptions { cache: None, candidates: 64, ..GemmOptions::default() })?;
    let y: DeviceBuffer<u8> = rig.device.zeros(PREFILL * 24_576 * 2)?;
    for (name, out, inner, output) in QWEN.into_iter().chain([SMOL[2]]) {
        for rows in [2, 32, 128, 256, PREFILL] {
            if rows == PREFILL && output == Output::F32 {
                continue;
            }
            let shape = GemmShape { output, room: rows.next_multiple_of(64), ..GemmShape::dense(rows, out, inner) };
            let plans = [data.gemms.plan(&shape)?, many.plan(&shape)?];
            let micros = time_plans(rig, &data, &plans, y.address())?;
            let floor = (out * inner * 2) as f64 / rig.ceiling;
            let floor = floor.max(2.0 * rows as f64 * out as f64 * inner as f64 / 790e6);
            let tflops = 2.0 * rows as f64 * out as f64 * inner as f64 / micros[0] / 1e6;
            let figure = format!(
                "{tflops:.0} TFLOP/s, {:.2} TB/s of weights, {:.3} of the best of 64; {} rows computed",
                (out * inner * 2) as f64 / micros[0] / 1e6,
                micros[1].min(micros[0]) / micros[0],
                plans[0].rows()
            );
            rig.record(format!("gemm {name}, {rows} rows"), micros[0], floor, figure);
        }
    }
    Ok(())
}

/// Median time of each plan, measured in turn; weights come from memory.
fn time_plans(rig: &Rig, data: &Data, plans: &[std::sync::Arc<GemmPlan>; 2], y: Address) -> Outcome<[f64; 2]> {
    let shape = plans[0].shape();
    let bytes = shape.out * shape.inner * 2;
    let copies = data.w.device.bytes() / bytes;
    let launches = (200e6 as usize).div_ceil(bytes).clamp(1, 200);
    let mut micros = [f64::INFINITY; 2];
    for _ in 0..2 {
        for (plan, micros) in plans.iter().zip(&mut micros) {
            // SAFETY: the operands are as large as the shape asks for.
            let time = unsafe {
                rig.micros(launches, |launch| {
                    let mut operands = data.operands(y, false);
                    operands.w = operands.w.offset(launch % copies * bytes);
                    data.gemms.run(plan, &rig.stream, &data.workspace, &operands)
                })?
            };
            *micros = micros.min(time);
        }
    }
    Ok(micros)
}
