//! Mixture of experts.

use crate::gemm::Cycle;
use crate::rig::{Outcome, Random, Rig, floats, name, poisoned};
use half::bf16;
use oasis_cuda::device::{Device, DeviceBuffer, DeviceError, Kernel};
use oasis_cuda::kernels::{
    Address, Combine, CombineParams, ExpertLayer, ExpertParams, ExpertStream, ExpertTiles, Route, RouteParams,
    SortPairs, SortPairsParams,
};
use oasis_cuda::measure::kernels::KernelBench;
use rayon::prelude::*;

/// A layer of experts.
#[derive(Debug, Clone, Copy)]
struct Shape {
    experts: usize,
    top: usize,
    hidden: usize,
    inter: usize,
}

const QWEN: Shape = Shape { experts: 128, top: 8, hidden: 2048, inter: 768 };

/// Who is routed where.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Routing {
    Random,
    /// All rows to the same experts.
    Same,
    /// Many equal logits.
    Ties,
    /// Rows have one position for two; every third is padding.
    Padded,
}

/// What a row's experts are, in the order of their numbers.
fn route(logits: &[f32], top: usize, normalize: bool) -> Vec<(usize, f64)> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |expert: usize| (f64::from(logits[expert]) - f64::from(largest)).exp();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).expect("no NaN").then(a.cmp(b)));
    let all: f64 = order.iter().map(|expert| weight(*expert)).sum();
    order.truncate(top);
    let chosen: f64 = order.iter().map(|expert| weight(*expert)).sum();
    order.sort_unstable();
    order.into_iter().map(|expert| (expert, weight(expert) / if normalize { chosen } else { all })).collect()
}

/// Kernels of a layer.
struct Kernels {
    route: Kernel<Route>,
    sort: Kernel<SortPairs>,
    stream: [Kernel<ExpertStream>; 2],
    /// Where the shape allows it.
    tiles: Option<[Kernel<ExpertTiles>; 2]>,
    /// Of f32 and of bf16 parts.
    combine: [Kernel<Combine>; 2],
}

impl Shape {
    fn layers(&self) -> [ExpertLayer; 2] {
        let Self { experts, hidden, inter, .. } = *self;
        [(inter, hidden, true), (hidden, inter, false)].map(|(out, inner, gated)| ExpertLayer {
            experts,
            out,
            inner,
            gated,
        })
    }

    fn load(&self, rig: &Rig) -> Result<Kernels, DeviceError> {
        let (device, compiler, [up, down]) = (&rig.device, &rig.compiler, self.layers());
        let Self { experts, top, hidden, inter } = *self;
        let wide = [hidden, inter].iter().all(|inner| inner % 64 == 0 && *inner >= 128);
        let tiles = || {
            Ok::<_, DeviceError>([device.load(compiler, &ExpertTiles(up))?, device.load(compiler, &ExpertTiles(down))?])
        };
        Ok(Kernels {
            route: device.load(compiler, &Route { experts, top })?,
            sort: device.load(compiler, &SortPairs)?,
            stream: [device.load(compiler, &ExpertStream(up))?, device.load(compiler, &ExpertStream(down))?],
            tiles: wide.then(tiles).transpose()?,
            combine: [
                device.load(compiler, &Combine { top, narrow: false })?,
                device.load(compiler, &Combine { top, narrow: true })?,
            ],
        })
    }
}

/// Buffers of a batch.
struct Batch {
    shape: Shape,
    rows: usize,
    queries: usize,
    logits: DeviceBuffer<f32>,
    position: DeviceBuffer<i32>,
    expert: DeviceBuffer<i32>,
    weight: DeviceBuffer<f32>,
    start: DeviceBuffer<i32>,
    pair_row: DeviceBuffer<i32>,
    pair_at: DeviceBuffer<i32>,
    h: DeviceBuffer<bf16>,
    parts: DeviceBuffer<f32>,
    y: DeviceBuffer<bf16>,
}

impl Batch {
    fn new(
        device: &Device,
        shape: Shape,
        logits: &[f32],
        positions: &[i32],
        queries: usize,
    ) -> Result<Self, DeviceError> {
        let rows = logits.len() / shape.experts;
        let pairs = rows * shape.top;
        Ok(Self {
            shape,
            rows,
            queries,
            logits: device.upload(logits)?,
            position: device.upload(positions)?,
            expert: poisoned(device, pairs)?,
            weight: poisoned(device, pairs)?,
            start: poisoned(device, shape.experts + 1)?,
            pair_row: poisoned(device, pairs)?,
            pair_at: poisoned(device, pairs)?,
            h: poisoned(device, pairs * shape.inter)?,
            parts: poisoned(device, pairs * shape.hidden)?,
            y: poisoned(device, rows * shape.hidden)?,
        })
    }

    fn route(&self, rig: &Rig, kernels: &Kernels, normalize: bool) -> Result<(), DeviceError> {
        let params = RouteParams {
            logits: self.logits.address(),
            position: self.position.address(),
            expert: self.expert.address(),
            weight: self.weight.address(),
            rows: self.rows as i32,
            queries: self.queries as i32,
            normalize: i32::from(normalize),
        };
        let Shape { experts, top, .. } = self.shape;
        let grid = (Route { experts, top }.ctas(self.rows), 1);
        // SAFETY: all buffers have the sizes that the parameters ask for.
        unsafe { kernels.route.launch(&rig.stream, grid, &params) }
    }

    fn sort(&self, rig: &Rig, kernels: &Kernels) -> Result<(), DeviceError> {
        let params = SortPairsParams {
            expert: self.expert.address(),
            start: self.start.address(),
            pair_row: self.pair_row.address(),
            pair_at: self.pair_at.address(),
            rows: self.rows as i32,
            top: self.shape.top as i32,
        };
        // SAFETY: as above.
        unsafe { kernels.sort.launch(&rig.stream, (self.shape.experts as u32, 1), &params) }
    }

    fn params(&self, layer: usize, x: Address, weights: Address) -> ExpertParams {
        let (x, out) = if layer == 0 { (x, self.h.address()) } else { (self.h.address(), self.parts.address()) };
        ExpertParams { x, weights, start: self.start.address(), pair_row: self.pair_row.address(), out }
    }

    fn stream(&self, rig: &Rig, kernels: &Kernels, layer: usize, x: Address, w: Address) -> Result<(), DeviceError> {
        let ctas = ExpertStream(self.shape.layers()[layer]).ctas(self.rows * self.shape.top);
        // SAFETY: as above.
        unsafe { kernels.stream[layer].launch(&rig.stream, (ctas, 1), &self.params(layer, x, w)) }
    }

    fn tiles(
        &self,
        rig: &Rig,
        kernels: &[Kernel<ExpertTiles>; 2],
        layer: usize,
        x: Address,
        w: Address,
    ) -> Result<(), DeviceError> {
        let ctas =
            ExpertTiles(self.shape.layers()[layer]).ctas(self.rows * self.shape.top, rig.device.facts.multiprocessors);
        // SAFETY: as above; parts in bf16 need half the room.
        unsafe { kernels[layer].launch(&rig.stream, (ctas, 1), &self.params(layer, x, w)) }
    }

    fn combine(&self, rig: &Rig, kernels: &Kernels, narrow: bool, base: Address) -> Result<(), DeviceError> {
        let params = CombineParams {
            parts: self.parts.address(),
            pair_at: self.pair_at.address(),
            weight: self.weight.address(),
            base,
            out: self.y.address(),
            hidden: self.shape.hidden as i32,
        };
        // SAFETY: as above.
        unsafe { kernels.combine[usize::from(narrow)].launch(&rig.stream, (self.rows as u32, 1), &params) }
    }
}

/// Weights of all experts and rows of activations.
struct Data {
    up: Cycle,
    down: Cycle,
    x: Vec<bf16>,
    d_x: DeviceBuffer<bf16>,
}

impl Data {
    fn new(rig: &mut Rig, shape: Shape, rows: usize) -> Outcome<Self> {
        let Shape { experts, hidden, inter, .. } = shape;
        // Gates of about 1: where the activation bends.
        let scale = 1.0 / (hidden as f32).sqrt();
        let x: Vec<bf16> = (0..rows * hidden).map(|_| bf16::from_f32(rig.random.float() * scale)).collect();
        let d_x = rig.device.upload(&x)?;
        let up = Cycle::new(rig, experts * 2 * inter * hidden)?;
        Ok(Self { up, down: Cycle::new(rig, experts * hidden * inter)?, x, d_x })
    }

    /// What the experts of a row add up to.
    fn want(&self, shape: Shape, row: usize, chosen: &[(usize, f64)]) -> Vec<f64> {
        let Shape { hidden, inter, .. } = shape;
        let x: Vec<f64> = floats(&self.x[row * hidden..][..hidden]).collect();
        let mut y = vec![0.0; hidden];
        for (expert, weight) in chosen {
            let product = |row: usize| self.up.dot((expert * 2 * inter + row) * hidden, &x);
            let h: Vec<f64> = (0..inter)
                .map(|i| {
                    let gate = product(i);
                    gate / (1.0 + (-gate).exp()) * product(inter + i)
                })
                .collect();
            for (i, y) in y.iter_mut().enumerate() {
                *y += weight * self.down.dot((expert * hidden + i) * inter, &h);
            }
        }
        y
    }
}

fn logits(random: &mut Random, rows: usize, experts: usize, routing: Routing) -> Vec<f32> {
    let row: Vec<f32> = (0..experts).map(|_| random.float() * 2.0).collect();
    (0..rows * experts)
        .map(|i| match routing {
            Routing::Same => row[i % experts],
            Routing::Ties => random.below(5) as f32 - 2.0,
            Routing::Random | Routing::Padded => random.float() * 2.0,
        })
        .collect()
}

pub fn check(rig: &mut Rig) -> Outcome<()> {
    use Routing::{Padded, Random, Same, Ties};
    let small = Shape { experts: 32, top: 4, hidden: 192, inter: 128 };
    let odd = Shape { experts: 64, top: 6, hidden: 320, inter: 192 };
    for (shape, cases) in [
        (small, vec![(1, Random), (2, Same), (9, Ties), (70, Same), (256, Padded), (1000, Random)]),
        (odd, vec![(1, Random), (17, Random), (40, Same), (300, Ties), (513, Same)]),
        (Shape { inter: 96, ..small }, vec![(5, Random), (64, Padded)]),
        (QWEN, vec![(1, Random), (2, Random), (16, Same), (64, Random), (256, Padded), (256, Same), (2048, Random)]),
    ] {
        let kernels = shape.load(rig)?;
        let most = cases.iter().map(|(rows, _)| *rows).max().unwrap_or_default();
        let data = Data::new(rig, shape, most)?;
        for (rows, routing) in cases {
            check_batch(rig, shape, &kernels, &data, rows, routing)?;
        }
    }
    Ok(())
}

fn check_batch(
    rig: &mut Rig,
    shape: Shape,
    kernels: &Kernels,
    data: &Data,
    rows: usize,
    routing: Routing,
) -> Outcome<()> {
    let Shape { experts, top, hidden, inter } = shape;
    let normalize = rows.is_multiple_of(2);
    let logits = logits(&mut rig.random, rows, experts, routing);
    let queries = if routing == Routing::Padded { 2 } else { 1 };
    let positions: Vec<i32> = (0..(rows / queries) as i32)
        .map(|at| if routing == Routing::Padded && at % 3 == 1 { -1 } else { at })
        .collect();
    let batch = Batch::new(&rig.device, shape, &logits, &positions, queries)?;
    let title = format!("{experts} experts of {hidden} x {inter}, {rows} rows, {routing:?}");

    batch.route(rig, kernels, normalize)?;
    batch.sort(rig, kernels)?;
    let chosen: Vec<Vec<(usize, f64)>> = logits
        .chunks(experts)
        .enumerate()
        .map(|(row, logits)| if positions[row / queries] < 0 { Vec::new() } else { route(logits, top, normalize) })
        .collect();
    check_lists(rig, &batch, &title, &chosen)?;

    // All elements of a few rows.
    let sampled: Vec<usize> = match rows * top * hidden * inter {
        0..100_000_000 => (0..rows).collect(),
        _ => (0..5).map(|_| rig.random.below(rows)).chain([0, rows - 1]).collect(),
    };
    let want: Vec<f64> = sampled.par_iter().flat_map_iter(|row| data.want(shape, *row, &chosen[*row])).collect();
    let (x, up, down) = (data.d_x.address(), data.up.device.address(), data.down.device.address());
    let read = |batch: &Batch| -> Outcome<(Vec<f64>, Vec<u16>)> {
        let y = batch.y.read()?;
        let rows = sampled.iter().flat_map(|row| floats(&y[row * hidden..][..hidden]).collect::<Vec<_>>()).collect();
        Ok((rows, y.iter().map(|y| y.to_bits()).collect()))
    };
    let mut outcomes = Vec::new();
    for _ in 0..2 {
        batch.stream(rig, kernels, 0, x, up)?;
        batch.stream(rig, kernels, 1, x, down)?;
        batch.combine(rig, kernels, false, Address::NONE)?;
        outcomes.push(read(&batch)?);
    }
    rig.compare(name::<ExpertStream>(&title), outcomes[0].0.iter().copied(), &want, 6e-3);
    rig.same(format!("{}: twice the same", name::<ExpertStream>(&title)), &outcomes[1].1, &outcomes[0].1);
    let Some(tiles) = &kernels.tiles else { return Ok(()) };
    let batch =
        Batch { h: poisoned(&rig.device, batch.h.len())?, parts: poisoned(&rig.device, batch.parts.len())?, ..batch };
    batch.tiles(rig, tiles, 0, x, up)?;
    batch.tiles(rig, tiles, 1, x, down)?;
    batch.combine(rig, kernels, true, Address::NONE)?;
    let (got, _) = read(&batch)?;
    rig.compare(name::<ExpertTiles>(&title), got, &want, 8e-3);
    batch.combine(rig, kernels, true, batch.y.address())?;
    let (got, _) = read(&batch)?;
    let twice: Vec<f64> = want.iter().map(|want| 2.0 * want).collect();
    rig.compare(format!("{}: onto what there is", name::<Combine>(&title)), got, &twice, 8e-3);
    Ok(())
}

/// Experts, weights and the order of pairs.
fn check_lists(rig: &mut Rig, batch: &Batch, title: &str, chosen: &[Vec<(usize, f64)>]) -> Outcome<()> {
    let Shape { experts, top, .. } = batch.shape;
    let padded = |row: &Vec<(usize, f64)>| if row.is_empty() { vec![(usize::MAX, 0.0); top] } else { row.clone() };
    let pairs: Vec<(usize, f64)> = chosen.iter().flat_map(padded).collect();
    let ids: Vec<i32> = pairs.iter().map(|(expert, _)| i32::try_from(*expert).unwrap_or(-1)).collect();
    let weights: Vec<f64> = pairs.iter().map(|(_, weight)| *weight).collect();
    rig.same(format!("{}: experts", name::<Route>(title)), &batch.expert.read()?, &ids);
    let got = batch.weight.read()?;
    rig.compare(format!("{}: weights", name::<Route>(title)), got.into_iter().map(f64::from), &weights, 1e-6);

    let mut order: Vec<usize> = (0..ids.len()).filter(|pair| ids[*pair] >= 0).collect();
    order.sort_by_key(|pair| (ids[*pair], *pair));
    let start: Vec<i32> =
        (0..=experts).map(|e| order.iter().filter(|pair| (ids[**pair] as usize) < e).count() as i32).collect();
    let rows: Vec<i32> = order.iter().map(|pair| (pair / top) as i32).collect();
    let mut at = vec![-1; ids.len()];
    order.iter().zip(0..).for_each(|(pair, place)| at[*pair] = place);
    rig.same(format!("{}: starts", name::<SortPairs>(title)), &batch.start.read()?, &start);
    rig.same(format!("{}: rows", name::<SortPairs>(title)), &batch.pair_row.read()?[..rows.len()], &rows);
    rig.same(format!("{}: places", name::<SortPairs>(title)), &batch.pair_at.read()?, &at);
    Ok(())
}

pub fn time(rig: &mut Rig, _: &KernelBench) -> Outcome<()> {
    let (shape, most) = (QWEN, 8192);
    let kernels = shape.load(rig)?;
    let data = Data::new(rig, shape, most)?;
    let (x, up, down) = (data.d_x.address(), data.up.device.address(), data.down.device.address());
    let matrix = (shape.hidden * shape.inter * 2) as f64;
    for rows in [1, 2, 8, 16, 32, 64, 128, 256] {
        // Several routings in turn: what one launch read is not in the cache of the next.
        let batches: Vec<Batch> = (0..4).map(|_| routed(rig, shape, &kernels, rows)).collect::<Outcome<_>>()?;
        let active = |batch: &Batch| -> Outcome<f64> {
            Ok(batch.start.read()?.windows(2).filter(|pair| pair[1] > pair[0]).count() as f64)
        };
        let experts = batches.iter().map(active).sum::<Outcome<f64>>()? / 4.0;
        let launches = if rows < 16 { 40 } else { 8 };
        // SAFETY: all buffers outlive the launches.
        let micros = unsafe {
            [
                rig.micros(launches, |i| batches[i % 4].stream(rig, &kernels, 0, x, up))?,
                rig.micros(launches, |i| batches[i % 4].stream(rig, &kernels, 1, x, down))?,
                rig.micros(launches, |i| batches[i % 4].combine(rig, &kernels, false, Address::NONE))?,
                rig.micros(launches, |i| {
                    let batch = &batches[i % 4];
                    batch.route(rig, &kernels, true)?;
                    batch.sort(rig, &kernels)
                })?,
                rig.micros(launches, |i| {
                    let batch = &batches[i % 4];
                    batch.route(rig, &kernels, true)?;
                    batch.sort(rig, &kernels)?;
                    batch.stream(rig, &kernels, 0, x, up)?;
                    batch.stream(rig, &kernels, 1, x, down)?;
                    batch.combine(rig, &kernels, false, Address::NONE)
                })?,
            ]
        };
        let title = format!("moe decode, {rows} rows, {experts:.0} experts");
        rig.record_bytes(format!("{title}: gate, up"), micros[0], experts * 2.0 * matrix);
        rig.record_bytes(format!("{title}: down"), micros[1], experts * matrix);
        rig.record(format!("{title}: combine; route + sort"), micros[2], 0.0, format!("{:.2} us", micros[3]));
        rig.record_bytes(format!("{title}: all"), micros[4], experts * 3.0 * matrix);
    }
    let tiles = kernels.tiles.as_ref().ok_or("the shape has tiles")?;
    for rows in [512, 2048, most] {
        let batch = routed(rig, shape, &kernels, rows)?;
        // SAFETY: as above.
        let micros = unsafe {
            [
                rig.micros(4, |_| batch.tiles(rig, tiles, 0, x, up))?,
                rig.micros(4, |_| batch.tiles(rig, tiles, 1, x, down))?,
                rig.micros(4, |_| batch.combine(rig, &kernels, true, Address::NONE))?,
                rig.micros(4, |_| {
                    batch.route(rig, &kernels, true)?;
                    batch.sort(rig, &kernels)
                })?,
            ]
        };
        let flops = |matrices: f64| matrices * matrix * (rows * shape.top) as f64;
        for (index, layer, matrices) in [(0, "gate, up", 2.0), (1, "down", 1.0)] {
            let figure = format!("{:.0} TFLOP/s", flops(matrices) / micros[index] / 1e6);
            rig.record(format!("moe prefill, {rows} rows: {layer}"), micros[index], flops(matrices) / 790e6, figure);
        }
        rig.record(
            format!("moe prefill, {rows} rows: combine; route + sort"),
            micros[2],
            0.0,
            format!("{:.2} us", micros[3]),
        );
        let all: f64 = micros.iter().sum();
        let figure = format!("{:.0} TFLOP/s", flops(3.0) / all / 1e6);
        rig.record(format!("moe prefill, {rows} rows: all"), all, flops(3.0) / 790e6, figure);
    }
    Ok(())
}

/// A batch with random experts.
fn routed(rig: &mut Rig, shape: Shape, kernels: &Kernels, rows: usize) -> Outcome<Batch> {
    let logits = logits(&mut rig.random, rows, shape.experts, Routing::Random);
    let positions: Vec<i32> = (0..rows as i32).collect();
    let batch = Batch::new(&rig.device, shape, &logits, &positions, 1)?;
    batch.route(rig, kernels, true)?;
    batch.sort(rig, kernels)?;
    rig.stream.synchronize()?;
    Ok(batch)
}
