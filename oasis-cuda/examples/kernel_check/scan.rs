//! Scores of summaries.

use crate::rig::{Outcome, Rig, name, poisoned, starts};
use crate::summaries::{Form, forms};
use half::bf16;
use oasis_core::ids::{KvHead, LayerId};
use oasis_core::policy::{HashSeed, SummarizerSpec};
use oasis_cuda::device::DeviceBuffer;
use oasis_cuda::kernels::{HashScores, HashScoresParams, Scan, ScanParams};
use oasis_cuda::layout::{scale_offset, tile_bytes};
use oasis_cuda::measure::kernels::{Heads, KernelBench};
use oasis_policies::summarizers::{Mean, Quest, QuestFp8, QuestInt4};
use rayon::prelude::*;

struct Batch {
    shape: Scan,
    form: Form,
    kv_heads: usize,
    max_tiles: usize,
    blocks: Vec<usize>,
    q: Vec<bf16>,
    summaries: Vec<u8>,
    device: Buffers,
}

struct Buffers {
    q: DeviceBuffer<bf16>,
    summaries: DeviceBuffer<u8>,
    start: DeviceBuffer<i32>,
    blocks: DeviceBuffer<i32>,
    scores: DeviceBuffer<f32>,
}

impl Batch {
    fn new(rig: &mut Rig, (form, shape): (Form, Scan), kv_heads: usize, blocks: &[usize], width: f32) -> Outcome<Self> {
        let max_tiles = blocks.iter().max().unwrap_or(&0).div_ceil(16) + 1;
        let mut q = rig.random.bf16s(blocks.len() * shape.queries * kv_heads * shape.group * shape.head_dim);
        q.iter_mut().for_each(|q| *q = bf16::from_f32(q.to_f32() * width));
        let summaries = form.random_tiles(&mut rig.random, blocks.len() * kv_heads * max_tiles);
        let tiles: Vec<usize> = blocks.iter().map(|blocks| blocks.div_ceil(16)).collect();
        let counts: Vec<i32> = blocks.iter().map(|blocks| *blocks as i32).collect();
        let device = Buffers {
            q: rig.device.upload(&q)?,
            summaries: rig.device.upload(&summaries)?,
            start: rig.device.upload(&starts(&tiles))?,
            blocks: rig.device.upload(&counts)?,
            scores: poisoned(&rig.device, blocks.len() * kv_heads * max_tiles * 16)?,
        };
        Ok(Self { shape, form, kv_heads, max_tiles, blocks: blocks.to_vec(), q, summaries, device })
    }

    fn params(&self) -> ScanParams {
        let Buffers { q, summaries, start, blocks, scores } = &self.device;
        ScanParams {
            q: q.address(),
            summaries: summaries.address(),
            start: start.address(),
            blocks: blocks.address(),
            scores: scores.address(),
            requests: self.blocks.len() as i32,
            kv_heads: self.kv_heads as i32,
            max_tiles: self.max_tiles as i32,
        }
    }

    /// Scores of one (request, KV head) in double precision, by the definitions of quest, which its kin share, and mean.
    fn reference(&self, request: usize, kv_head: usize) -> Vec<f64> {
        let Scan { head_dim, group, queries, query, max, .. } = self.shape;
        let tile = tile_bytes(self.shape.bytes);
        let first = (request * self.kv_heads + kv_head) * self.max_tiles;
        (0..self.blocks[request])
            .into_par_iter()
            .map(|block| {
                let rows = self.form.read(&self.summaries[(first + block / 16) * tile..][..tile], block % 16);
                let scores = (0..group).map(|g| {
                    let row = ((request * queries + query) * self.kv_heads + kv_head) * group + g;
                    let coordinate = |d: usize| {
                        let q = self.q[row * head_dim + d].to_f64();
                        // Row 0 counts where q is positive, row 1 where it is negative; one row always counts.
                        q * if self.form.rows == 2 && q < 0.0 { rows[head_dim + d] } else { rows[d] }
                    };
                    let sum = (0..head_dim).map(coordinate).sum::<f64>();
                    if !self.form.has_side() {
                        return sum;
                    }
                    let square: f64 = (0..head_dim).map(|d| self.q[row * head_dim + d].to_f64().powi(2)).sum();
                    sum + self.form.weight(square.sqrt()) * rows[head_dim * self.form.rows]
                });
                if max { scores.fold(f64::NEG_INFINITY, f64::max) } else { scores.sum() }
            })
            .collect()
    }
}

pub fn check(rig: &mut Rig) -> Outcome<()> {
    let blocks = [0, 1, 16, 0, 633, 517, 15];
    for (head_dim, group, queries, max, width) in [
        (128, 4, 2, false, 1.0),
        (64, 8, 2, true, 1.0),
        (64, 3, 1, false, 2.0_f32.powi(40)),
        (128, 16, 2, true, 2.0_f32.powi(-30)),
    ] {
        for form in forms(head_dim)? {
            let (summarizer, bytes, stages) = (form.code, form.bytes, Scan::stages(form.bytes));
            let shape = Scan { head_dim, group, queries, query: queries - 1, max, stages, summarizer, bytes };
            let batch = Batch::new(rig, (form, shape), 2, &blocks, width)?;
            let kernel = rig.device.load(&rig.compiler, &shape)?;
            let mut want = Vec::new();
            for request in 0..blocks.len() {
                for kv_head in 0..2 {
                    want.extend(batch.reference(request, kv_head));
                }
            }
            for ctas in [1, 264] {
                // SAFETY: the batch's buffers have the sizes that its shape asks for.
                unsafe { kernel.launch(&rig.stream, (ctas, 1), &batch.params())? };
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
    check_nan(rig)?;
    check_hash(rig)
}

/// Scores that are a hash, against oasis-core's.
fn check_hash(rig: &mut Rig) -> Outcome<()> {
    let (seed, layer, blocks, stride) = (HashSeed(rig.seed), LayerId(7), [0, 1, 700, 33], 704);
    for (head_dim, group, queries, kv_heads) in [(128, 4, 2, 2), (64, 3, 1, 3)] {
        let shape = HashScores { head_dim, group, queries, query: queries - 1 };
        let width = group * head_dim;
        let q = rig.random.bf16s(blocks.len() * queries * kv_heads * width);
        let (d_q, d_blocks) = (rig.device.upload(&q)?, rig.device.upload(&blocks)?);
        let d_scores: DeviceBuffer<f32> = poisoned(&rig.device, blocks.len() * kv_heads * stride)?;
        let params = HashScoresParams {
            q: d_q.address(),
            blocks: d_blocks.address(),
            scores: d_scores.address(),
            seed: seed.of_layer(layer),
            kv_heads: kv_heads as i32,
            stride: stride as i32,
        };
        let kernel = rig.device.load(&rig.compiler, &shape)?;
        // SAFETY: the buffers have the sizes that the shape asks for.
        unsafe { kernel.launch(&rig.stream, (kv_heads as u32, blocks.len() as u32), &params)? };
        let mut want = vec![f32::from_bits(u32::MAX); d_scores.len()];
        for (request, head) in (0..blocks.len()).flat_map(|request| (0..kv_heads).map(move |head| (request, head))) {
            let row = ((request * queries + queries - 1) * kv_heads + head) * width;
            let query: Vec<f32> = q[row..][..width].iter().map(|q| q.to_f32()).collect();
            let scores = &mut want[(request * kv_heads + head) * stride..][..blocks[request] as usize];
            seed.score(layer, KvHead::from(head), &query, scores);
        }
        let bits = |scores: &[f32]| scores.iter().map(|score| score.to_bits()).collect::<Vec<_>>();
        let what = format!("d {head_dim} group {group}");
        rig.same(name::<HashScores>(&what), &bits(&d_scores.read()?), &bits(&want));
    }
    Ok(())
}

/// Packed rows that hold a NaN or an infinite key give NaN, and no other block does.
fn check_nan(rig: &mut Rig) -> Outcome<()> {
    let (form, shape) = qwen3_8b(&QuestFp8 {})?;
    let mut batch = Batch::new(rig, (form, shape), 1, &[70], 1.0)?;
    for block in [3_usize, 64] {
        let tile = block / 16 * tile_bytes(shape.bytes);
        let scale = tile + scale_offset(2, shape.head_dim, block % 16, block % 2);
        batch.summaries[scale..][..2].copy_from_slice(&bf16::NAN.to_le_bytes());
    }
    batch.device.summaries = rig.device.upload(&batch.summaries)?;
    let kernel = rig.device.load(&rig.compiler, &shape)?;
    // SAFETY: as in `check`.
    unsafe { kernel.launch(&rig.stream, (2, 1), &batch.params())? };
    let scores = batch.device.scores.read()?;
    let nan: Vec<usize> = (0..70).filter(|block| scores[*block].is_nan()).collect();
    rig.same(name::<Scan>("quest_fp8.cuh: NaN where a row is"), &nan, &[3, 64]);
    Ok(())
}

fn qwen3_8b(spec: &dyn SummarizerSpec) -> Outcome<(Form, Scan)> {
    let form = Form::new(spec, 128)?;
    let (summarizer, bytes, stages) = (form.code, form.bytes, Scan::stages(form.bytes));
    Ok((form, Scan { head_dim: 128, group: 4, queries: 2, query: 1, max: false, stages, summarizer, bytes }))
}

pub fn time(rig: &mut Rig, bench: &KernelBench) -> Outcome<()> {
    let heads = Heads { head_dim: 128, kv_heads: 8, group: 4 };
    let specs: [(&str, &dyn SummarizerSpec); 4] =
        [("quest", &Quest {}), ("quest-fp8", &QuestFp8 {}), ("quest-int4", &QuestInt4 {}), ("mean", &Mean {})];
    for (kind, spec) in specs {
        let form = Form::new(spec, heads.head_dim)?;
        for batch in [(1, 1024), (8, 1024), (64, 1024), (64, 2048)] {
            rig.push(bench.time_scan(heads, 2, batch, kind, (form.code, form.bytes))?);
        }
    }
    Ok(())
}
