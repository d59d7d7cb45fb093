//! Scores of summaries.

use crate::rig::{Outcome, Rig, at, name, poisoned, starts, summarizer};
use half::bf16;
use oasis_cuda::compile::SourceFile;
use oasis_cuda::device::{DeviceBuffer, DeviceError, Kernel};
use oasis_cuda::kernels::{Scan, ScanParams};
use oasis_cuda::layout::{summary_offset, tile_bytes};
use oasis_policies::summarizers::{Mean, Quest};
use rayon::prelude::*;

struct Batch {
    shape: Scan,
    kv_heads: usize,
    max_tiles: usize,
    blocks: Vec<usize>,
    q: Vec<bf16>,
    summaries: Vec<bf16>,
    device: Buffers,
}

struct Buffers {
    q: DeviceBuffer<bf16>,
    summaries: Vec<DeviceBuffer<bf16>>,
    start: DeviceBuffer<i32>,
    blocks: DeviceBuffer<i32>,
    scores: DeviceBuffer<f32>,
}

impl Batch {
    fn new(rig: &mut Rig, shape: Scan, kv_heads: usize, blocks: &[usize], copies: usize) -> Outcome<Self> {
        let max_tiles = blocks.iter().max().unwrap_or(&0).div_ceil(16) + 1;
        let q = rig.random.bf16s(blocks.len() * shape.queries * kv_heads * shape.group * shape.head_dim);
        let elements = blocks.len() * kv_heads * max_tiles * tile_bytes(shape.rows, shape.head_dim) / 2;
        let piece = rig.random.bf16s(elements.min(1 << 24));
        let summaries: Vec<bf16> = piece.iter().copied().cycle().take(elements).collect();
        let tiles: Vec<usize> = blocks.iter().map(|blocks| blocks.div_ceil(16)).collect();
        let counts: Vec<i32> = blocks.iter().map(|blocks| *blocks as i32).collect();
        let device = Buffers {
            q: rig.device.upload(&q)?,
            summaries: (0..copies).map(|_| rig.device.upload(&summaries)).collect::<Result<_, _>>()?,
            start: rig.device.upload(&starts(&tiles))?,
            blocks: rig.device.upload(&counts)?,
            scores: poisoned(&rig.device, blocks.len() * kv_heads * max_tiles * 16)?,
        };
        Ok(Self { shape, kv_heads, max_tiles, blocks: blocks.to_vec(), q, summaries, device })
    }

    fn params(&self, copy: usize) -> ScanParams {
        let Buffers { q, summaries, start, blocks, scores } = &self.device;
        ScanParams {
            q: q.address(),
            summaries: summaries[copy % summaries.len()].address(),
            start: start.address(),
            blocks: blocks.address(),
            scores: scores.address(),
            requests: self.blocks.len() as i32,
            kv_heads: self.kv_heads as i32,
            max_tiles: self.max_tiles as i32,
        }
    }

    fn bytes(&self) -> f64 {
        let tiles: usize = self.blocks.iter().map(|blocks| blocks.div_ceil(16)).sum();
        (tiles * self.kv_heads * tile_bytes(self.shape.rows, self.shape.head_dim)) as f64
    }

    /// Scores of one (request, KV head) in double precision, by the definitions of quest and mean.
    fn reference(&self, request: usize, kv_head: usize) -> Vec<f64> {
        let Scan { head_dim, group, queries, query, max, rows, .. } = self.shape;
        let tile = tile_bytes(rows, head_dim) / 2;
        let first = (request * self.kv_heads + kv_head) * self.max_tiles;
        (0..self.blocks[request])
            .into_par_iter()
            .map(|block| {
                let tile = &self.summaries[(first + block / 16) * tile..][..tile];
                let scores = (0..group).map(|g| {
                    let row = ((request * queries + query) * self.kv_heads + kv_head) * group + g;
                    let coordinate = |d: usize| {
                        let q = self.q[row * head_dim + d].to_f64();
                        let value = |row| at(tile, summary_offset(rows, head_dim, block % 16, row, d));
                        // Row 0 counts where q is positive, row 1 where it is negative; one row always counts.
                        q * if rows == 2 && q < 0.0 { value(1) } else { value(0) }
                    };
                    (0..head_dim).map(coordinate).sum::<f64>()
                });
                if max { scores.fold(f64::NEG_INFINITY, f64::max) } else { scores.sum() }
            })
            .collect()
    }
}

fn shapes() -> Outcome<[(SourceFile, usize); 2]> {
    Ok([(summarizer(&Quest {})?, 2), (summarizer(&Mean {})?, 1)])
}

pub fn check(rig: &mut Rig) -> Outcome<()> {
    let blocks = [0, 1, 16, 0, 633, 517, 15];
    for (summarizer, rows) in shapes()? {
        for (head_dim, group, queries, max) in
            [(128, 4, 2, false), (64, 8, 2, true), (64, 3, 1, false), (128, 16, 2, true)]
        {
            let shape = Scan { head_dim, group, queries, query: queries - 1, max, stages: 2, summarizer, rows };
            let batch = Batch::new(rig, shape, 2, &blocks, 1)?;
            let kernel = rig.device.load(&rig.compiler, &shape)?;
            let mut want = Vec::new();
            for request in 0..blocks.len() {
                for kv_head in 0..2 {
                    want.extend(batch.reference(request, kv_head));
                }
            }
            for ctas in [1, 264] {
                // SAFETY: the batch's buffers have the sizes that its shape asks for.
                unsafe { kernel.launch(&rig.stream, (ctas, 1), &batch.params(0))? };
                let scores = batch.device.scores.read()?;
                let (mut got, mut beyond) = (Vec::new(), 0);
                for (pair, scores) in scores.chunks(batch.max_tiles * 16).enumerate() {
                    let (inside, outside) = scores.split_at(blocks[pair / 2]);
                    got.extend(inside.iter().map(|score| f64::from(*score)));
                    beyond += outside.iter().filter(|score| score.to_bits() != u32::MAX).count();
                }
                let what = format!("{} d {head_dim} group {group} max {max} x {ctas}", summarizer.name);
                rig.compare(name::<Scan>(&what), got, &want, 1e-5);
                rig.same(name::<Scan>(&format!("{what}: nothing beyond")), &[beyond], &[0]);
            }
        }
    }
    Ok(())
}

fn qwen3_8b() -> Outcome<Scan> {
    let [(summarizer, rows), _] = shapes()?;
    Ok(Scan { head_dim: 128, group: 4, queries: 2, query: 1, max: false, stages: 2, summarizer, rows })
}

pub fn time(rig: &mut Rig) -> Outcome<()> {
    let shape = qwen3_8b()?;
    let kernel = rig.device.load(&rig.compiler, &shape)?;
    for (requests, blocks) in [(1, 1024), (8, 1024), (64, 1024), (64, 2048)] {
        let batch = Batch::new(rig, shape, 8, &vec![blocks; requests], if requests < 64 { 12 } else { 2 })?;
        // SAFETY: as in `check`.
        let micros = unsafe { rig.micros(24, |i| kernel.launch(&rig.stream, rig.full_grid(), &batch.params(i)))? };
        rig.record_bytes(format!("quest scan, batch {requests}, {blocks} blocks, 8 KV heads"), micros, batch.bytes());
    }
    Ok(())
}

/// A launch of the batch that the gather is measured beside: 64 requests, 1,024 blocks.
pub struct Foreground {
    kernel: Kernel<Scan>,
    batch: Batch,
}

impl Foreground {
    pub fn new(rig: &mut Rig) -> Outcome<Self> {
        let shape = qwen3_8b()?;
        let batch = Batch::new(rig, shape, 8, &[1024; 64], 2)?;
        Ok(Self { kernel: rig.device.load(&rig.compiler, &shape)?, batch })
    }

    pub fn launch(&self, rig: &Rig, index: usize, ctas: u32) -> Result<(), DeviceError> {
        // SAFETY: as in `check`.
        unsafe { self.kernel.launch(&rig.stream, (ctas, 1), &self.batch.params(index)) }
    }
}
