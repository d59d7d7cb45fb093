//! Linear layers of few rows: every way to run them, and the ways beside cuBLASLt's best.

use crate::gemm::Cycle;
use crate::rig::{Outcome, Rig, poisoned};
use half::bf16;
use oasis_cuda::device::{DeviceBuffer, Kernel};
use oasis_cuda::gemm::{GemmOptions, GemmPlan, GemmShape, Gemms, Operands, Output};
use oasis_cuda::kernels::{AddNorm, AddNormParams, Address, LinearStream};
use oasis_cuda::measure::kernels::KernelBench;

/// Layers as (name, out, inner, output).
type Layer = (&'static str, usize, usize, Output);
const LAYERS: [Layer; 18] = [
    ("Qwen3-8B qkv", 6144, 4096, Output::Bf16),
    ("Qwen3-8B o", 4096, 4096, Output::Bf16),
    ("Qwen3-8B gate_up", 24_576, 4096, Output::Bf16),
    ("Qwen3-8B down", 4096, 12_288, Output::Bf16),
    ("Qwen3-8B lm_head", 151_936, 4096, Output::F32),
    ("EAGLE-3 qkv", 6144, 8192, Output::Bf16),
    ("EAGLE-3 lm_head", 32_000, 4096, Output::F32),
    ("Llama-3.1-8B gate_up", 28_672, 4096, Output::Bf16),
    ("Llama-3.1-8B down", 4096, 14_336, Output::Bf16),
    ("oasis-tiny qkv", 768, 256, Output::Bf16),
    ("oasis-tiny gate_up", 1536, 256, Output::Bf16),
    ("oasis-tiny down", 256, 768, Output::Bf16),
    ("oasis-tiny lm_head", 4096, 256, Output::F32),
    ("SmolLM2 qkv", 960, 576, Output::Bf16),
    ("SmolLM2 o", 576, 576, Output::Bf16),
    ("SmolLM2 gate_up", 3072, 576, Output::Bf16),
    ("SmolLM2 down", 576, 1536, Output::Bf16),
    ("odd", 1000, 1096, Output::Bf16),
];
const TILES: [usize; 2] = [64, 128];
const SPLITS: [usize; 4] = [1, 2, 4, 8];
/// What `y` holds where it is added to.
const HELD: f32 = 40.0;

/// What all products read.
struct Data {
    x: Cycle,
    w: Cycle,
}

impl Data {
    fn new(rig: &mut Rig) -> Outcome<Self> {
        Ok(Self { x: Cycle::new(rig, 64 * 3 * 14_336)?, w: Cycle::new(rig, 151_936 * 4096)? })
    }

    fn operands(&self, y: Address) -> Operands {
        Operands { x: self.x.device.address(), w: self.w.device.address(), y, bias: self.x.device.address() }
    }

    fn want(&self, shape: &GemmShape, row: usize, out: usize) -> f64 {
        let (x, w) = (row * shape.x_stride, out * shape.w_stride);
        let sum: f64 = (0..shape.inner).map(|i| self.x.at(x + i) * self.w.at(w + i)).sum();
        let held = if shape.accumulate { f64::from(HELD) } else { 0.0 };
        sum + held + if shape.bias { self.x.at(out) } else { 0.0 }
    }

    /// `y` after one launch of `way`; gaps and other rows stay as they were.
    fn run(&self, rig: &Rig, shape: &GemmShape, kernel: &Kernel<LinearStream>, way: Way) -> Outcome<Vec<f32>> {
        let (spec, split) = way;
        let grid = (spec.ctas(shape.out, split), 1);
        let len = (shape.rows + 1) * shape.y_stride;
        let launch = |y: Address| -> Outcome<()> {
            let params = spec.params(&rig.device, shape, &self.operands(y))?;
            // SAFETY: the operands have the shape, `y` one row more.
            unsafe { kernel.launch_in_clusters(&rig.stream, grid, split as u32, &params)? };
            Ok(())
        };
        Ok(match shape.output {
            Output::Bf16 => {
                let y = match shape.accumulate {
                    true => rig.device.upload(&vec![bf16::from_f32(HELD); len])?,
                    false => poisoned(&rig.device, len)?,
                };
                launch(y.address())?;
                y.read()?.into_iter().map(bf16::to_f32).collect()
            }
            Output::F32 => {
                let y: DeviceBuffer<f32> = poisoned(&rig.device, len)?;
                launch(y.address())?;
                y.read()?
            }
        })
    }
}

/// Kernel and split.
type Way = (LinearStream, usize);

pub fn check(rig: &mut Rig) -> Outcome<()> {
    let data = Data::new(rig)?;
    for (name, out, inner, output) in LAYERS {
        let large = out > 100_000;
        for rows in [1, 2, 8, 13, 32, 64].into_iter().filter(|rows| !large || [2, 64].contains(rows)) {
            check_shape(rig, &data, name, &GemmShape { output, ..GemmShape::dense(rows, out, inner) })?;
        }
    }
    let dense = GemmShape::dense(5, 4096, 1536);
    let wide = GemmShape { x_stride: 3072, w_stride: 1600, y_stride: 6144, ..dense.clone() };
    let bias = GemmShape { bias: true, ..dense.clone() };
    let added = GemmShape { accumulate: true, ..dense };
    let all = GemmShape { bias: true, accumulate: true, ..wide.clone() };
    for (name, shape) in [("strided", wide), ("bias", bias), ("added", added), ("all of these", all)] {
        check_shape(rig, &data, name, &shape)?;
    }
    Ok(())
}

fn check_shape(rig: &mut Rig, data: &Data, name: &str, shape: &GemmShape) -> Outcome<()> {
    let corners = [(0, 0), (0, shape.out - 1), (shape.rows - 1, 0), (shape.rows - 1, shape.out - 1)];
    let samples: Vec<(usize, usize)> =
        (0..124).map(|_| (rig.random.below(shape.rows), rig.random.below(shape.out))).chain(corners).collect();
    let want: Vec<f64> = samples.iter().map(|(row, out)| data.want(shape, *row, *out)).collect();
    let limit = if shape.output == Output::F32 { 1e-4 } else { 4e-3 };
    let splits = if shape.out > 100_000 { &SPLITS[..2] } else { &SPLITS };
    for tile in TILES {
        let spec = LinearStream::for_rows(shape.rows, tile).ok_or("too many rows")?;
        let kernel = rig.device.load(&rig.compiler, &spec)?;
        for split in splits {
            let name = format!("linear {name}, {} rows, {tile} outputs, {split} CTAs", shape.rows);
            let got = data.run(rig, shape, &kernel, (spec, *split))?;
            let sampled = samples.iter().map(|(row, out)| f64::from(got[row * shape.y_stride + out]));
            rig.compare(&name, sampled, &want, limit);
            let written = |at: usize| at / shape.y_stride < shape.rows && at % shape.y_stride < shape.out;
            let old = if shape.accumulate { HELD } else { f32::NAN };
            let wrong = got.iter().enumerate().filter(|(at, y)| {
                if written(*at) { y.is_nan() } else { y.is_nan() != old.is_nan() || (!old.is_nan() && **y != old) }
            });
            rig.same(format!("{name}: all written, nothing else"), &[wrong.count()], &[0]);
            if shape.rows == 32 && shape.out < 100_000 {
                let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
                let again = data.run(rig, shape, &kernel, (spec, *split))?;
                rig.same(format!("{name}: twice the same"), &bits(&again), &bits(&got));
                let alone = GemmShape { rows: 1, room: 1, ..shape.clone() };
                let spec = LinearStream::for_rows(1, tile).ok_or("too many rows")?;
                let kernel = rig.device.load(&rig.compiler, &spec)?;
                let row = data.run(rig, &alone, &kernel, (spec, *split))?;
                rig.same(format!("{name}: a row alone"), &bits(&row[..shape.out]), &bits(&got[..shape.out]));
            }
        }
    }
    Ok(())
}

pub fn time(rig: &mut Rig, _: &KernelBench) -> Outcome<()> {
    let data = Data::new(rig)?;
    let open = |stream_rows| {
        Gemms::open(&rig.device, GemmOptions { cache: None, candidates: 64, stream_rows, ..GemmOptions::default() })
    };
    let (library, all) = (open(0)?, open(LinearStream::MOST_ROWS)?);
    let workspace = all.workspace()?;
    let y: DeviceBuffer<u8> = rig.device.zeros(64 * 151_936 * 4)?;
    let before = Norm::new(rig)?;
    for (name, out, inner, output) in LAYERS {
        if name.starts_with("Llama") || name == "odd" {
            continue;
        }
        for rows in [2_usize, 8, 16, 32, 64] {
            let shape = GemmShape { output, room: rows.next_multiple_of(64), ..GemmShape::dense(rows, out, inner) };
            let bytes = out * inner * 2;
            let copies = data.w.device.bytes() / bytes;
            let launches = (200e6 as usize).div_ceil(bytes).clamp(1, 200);
            let time = |gemms: &Gemms, plan: &GemmPlan, normed: bool| {
                // SAFETY: the operands are as large as the shape asks for, the norm's buffers as its rows.
                unsafe {
                    rig.micros(launches, |launch| {
                        if normed {
                            before.kernel.launch(&rig.stream, (rows as u32, 1), &before.params())?;
                        }
                        let operands = data.operands(y.address());
                        let operands = Operands { w: operands.w.offset(launch % copies * bytes), ..operands };
                        gemms.run(plan, &rig.stream, &workspace, &operands)
                    })
                }
            };
            let (theirs, chosen) = (library.plan(&shape)?, all.plan(&shape)?);
            let alone = [time(&library, &theirs, false)?, time(&all, &chosen, false)?];
            let normed = [time(&library, &theirs, true)?, time(&all, &chosen, true)?];
            let way = chosen.streamed().map_or_else(
                || "cuBLASLt is chosen".to_owned(),
                |way| format!("{} outputs, {} CTAs", way.tile, way.split),
            );
            let figure =
                format!("{way}; cuBLASLt {:.2}; after a norm {:.2}, cuBLASLt {:.2}", alone[0], normed[1], normed[0]);
            rig.record(format!("linear {name}, {rows} rows"), alone[1], bytes as f64 / rig.ceiling, figure);
        }
    }
    Ok(())
}

/// What products follow in a step.
struct Norm {
    kernel: Kernel<AddNorm>,
    /// 64 rows, and the weight.
    rows: DeviceBuffer<bf16>,
}

impl Norm {
    const HIDDEN: usize = 4096;

    fn new(rig: &mut Rig) -> Outcome<Self> {
        let rows = rig.device.upload(&rig.random.bf16s(65 * Self::HIDDEN))?;
        Ok(Self { kernel: rig.device.load(&rig.compiler, &AddNorm { hidden: Self::HIDDEN })?, rows })
    }

    fn params(&self) -> AddNormParams {
        AddNormParams {
            residual: self.rows.address(),
            x: Address::NONE,
            weight: self.rows.address().offset(64 * Self::HIDDEN * 2),
            out: self.rows.address(),
            hidden: Self::HIDDEN as i32,
            out_stride: Self::HIDDEN as i32,
            eps: 1e-6,
        }
    }
}
