//! Decode attention.

use crate::rig::{Outcome, Rig, at, floats, name, poisoned, starts};
use half::bf16;
use oasis_cuda::device::DeviceBuffer;
use oasis_cuda::kernels::{Address, Attention, AttentionParams};
use oasis_cuda::layout::{BLOCK_TOKENS, entry_bytes, key_offset, value_offset};
use oasis_cuda::measure::kernels::{Heads, KernelBench};
use rayon::prelude::*;

/// A batch on the device.
struct Batch {
    shape: Attention,
    kv_heads: usize,
    slots: usize,
    /// Whether the newest block is kept apart; without, it has a page.
    apart: bool,
    /// -1 is padding.
    positions: Vec<i32>,
    full: Vec<usize>,
    q: Vec<bf16>,
    entries: Vec<bf16>,
    pages: Vec<i32>,
    tail: Vec<bf16>,
    device: Buffers,
}

/// Most entries of a KV head besides its tail.
const MOST: i32 = 40;

struct Buffers {
    q: DeviceBuffer<bf16>,
    entries: DeviceBuffer<bf16>,
    pages: DeviceBuffer<i32>,
    tail: DeviceBuffer<bf16>,
    start: DeviceBuffer<i32>,
    position: DeviceBuffer<i32>,
    out: DeviceBuffer<bf16>,
    partial: DeviceBuffer<u8>,
    arrived: DeviceBuffer<u32>,
}

impl Batch {
    fn new(
        rig: &mut Rig,
        shape: Attention,
        kv_heads: usize,
        slots: usize,
        apart: bool,
        positions: &[i32],
    ) -> Outcome<Self> {
        let requests = positions.len();
        let elements = entry_bytes(shape.head_dim) / 2;
        let full: Vec<usize> = positions.iter().map(|p| (p.max(&0) / 16).min(MOST) as usize).collect();
        let tails = |p: i32| if p < 0 { 0 } else { (p + shape.queries as i32 - 1) / 16 - p / 16 + 1 };
        let units: Vec<usize> = positions.iter().zip(&full).map(|(p, full)| full + tails(*p) as usize).collect();
        let q = rig.random.bf16s(requests * shape.queries * kv_heads * shape.group * shape.head_dim);
        let mut entries = rig.random.bf16s(requests * kv_heads * slots * elements);
        let mut tail = rig.random.bf16s(requests * kv_heads * 2 * elements);
        let pages = rig.random.shuffled(requests * slots);
        // What no token sees is not a number.
        for (request, position) in positions.iter().enumerate().filter(|(_, position)| **position >= 0) {
            let seen = *position as usize + shape.queries;
            let newest = (seen - 1) / BLOCK_TOKENS;
            for head in 0..kv_heads {
                let entry = match apart {
                    true => &mut tail[((request * kv_heads + head) * 2 + newest % 2) * elements..][..elements],
                    false => {
                        let page = pages[request * slots + newest] as usize;
                        &mut entries[(page * kv_heads + head) * elements..][..elements]
                    }
                };
                for token in seen - newest * BLOCK_TOKENS..BLOCK_TOKENS {
                    for d in 0..shape.head_dim {
                        entry[key_offset(shape.head_dim, token, d) / 2] = bf16::NAN;
                        entry[value_offset(shape.head_dim, token, d) / 2] = bf16::NAN;
                    }
                }
            }
        }
        let device = Buffers {
            q: rig.device.upload(&q)?,
            entries: rig.device.upload(&entries)?,
            pages: rig.device.upload(&pages)?,
            tail: rig.device.upload(&tail)?,
            start: rig.device.upload(&starts(&units))?,
            position: rig.device.upload(positions)?,
            out: poisoned(&rig.device, q.len())?,
            partial: poisoned(&rig.device, shape.partial_bytes(1024))?,
            arrived: rig.device.zeros(requests * kv_heads)?,
        };
        Ok(Self { shape, kv_heads, slots, apart, positions: positions.to_vec(), full, q, entries, pages, tail, device })
    }

    fn params(&self) -> AttentionParams {
        let Buffers { q, entries, pages, tail, start, position, out, partial, arrived } = &self.device;
        AttentionParams {
            q: q.address(),
            entries: entries.address(),
            pages: if self.shape.paged { pages.address() } else { Address::NONE },
            tail: if self.apart { tail.address() } else { Address::NONE },
            start: start.address(),
            position: position.address(),
            out: out.address(),
            partial: partial.address(),
            arrived: arrived.address(),
            requests: self.positions.len() as i32,
            kv_heads: self.kv_heads as i32,
            slots: self.slots as i32,
            scale: self.shape.scale(),
        }
    }

    /// Elements of one request's output.
    fn row_elements(&self) -> usize {
        self.shape.queries * self.kv_heads * self.shape.group * self.shape.head_dim
    }

    /// Attention in double precision, `[queries][kv_heads * group][head_dim]` of one request.
    fn reference(&self, request: usize) -> Vec<f64> {
        let Attention { head_dim, group, queries, paged, .. } = self.shape;
        let elements = entry_bytes(head_dim) / 2;
        let position = self.positions[request];
        let heads = self.kv_heads * group;
        let rows: Vec<(usize, usize)> = (0..queries).flat_map(|t| (0..heads).map(move |h| (t, h))).collect();
        rows.into_par_iter()
            .flat_map_iter(|(token, head)| {
                let kv_head = head / group;
                let pair = request * self.kv_heads + kv_head;
                let q = &self.q[((request * queries + token) * heads + head) * head_dim..][..head_dim];
                let block = position as usize / BLOCK_TOKENS;
                let slot = |i: usize| match paged {
                    // The newest blocks, where there are more than may be attended to.
                    true => {
                        let block = block - self.full[request] + i;
                        self.pages[request * self.slots + block] as usize * self.kv_heads + kv_head
                    }
                    false => pair * self.slots + i,
                };
                let resident = (0..self.full[request]).map(|i| (&self.entries[slot(i) * elements..][..elements], 16));
                let seen = position as usize + token + 1;
                let tail = (block..=(seen - 1) / BLOCK_TOKENS).map(|b| {
                    let entry = match self.apart {
                        true => &self.tail[(pair * 2 + b % 2) * elements..][..elements],
                        false => &self.entries[slot(self.full[request] + b - block) * elements..][..elements],
                    };
                    (entry, (seen - b * BLOCK_TOKENS).min(16))
                });
                let keys: Vec<(&[bf16], usize)> =
                    resident.chain(tail).flat_map(|(entry, tokens)| (0..tokens).map(move |t| (entry, t))).collect();
                let scale = 1.0 / (head_dim as f64).sqrt();
                let scores: Vec<f64> = keys
                    .iter()
                    .map(|(e, t)| {
                        (0..head_dim).map(|d| q[d].to_f64() * at(e, key_offset(head_dim, *t, d))).sum::<f64>() * scale
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let mut out = vec![0.0; head_dim];
                for ((entry, token), weight) in keys.iter().zip(&weights) {
                    for (d, out) in out.iter_mut().enumerate() {
                        *out += weight / sum * at(entry, value_offset(head_dim, *token, d));
                    }
                }
                out
            })
            .collect()
    }
}

pub fn check(rig: &mut Rig) -> Outcome<()> {
    // Padding, an empty context, block edges with and without a draft token in the next block, more blocks than slots.
    let positions = [0, -1, 14, 15, 16, 31, 37 * 16 + 3, -1, 52 * 16 + 15];
    for (head_dim, group, queries, paged, apart) in [
        (128, 4, 2, false, true),
        (128, 4, 1, true, true),
        (64, 3, 2, false, true),
        (64, 8, 1, true, true),
        (128, 16, 2, false, true),
        (128, 7, 2, true, true),
        (64, 1, 1, false, true),
        (64, 7, 1, true, true),
        (128, 5, 2, false, true),
        (128, 12, 1, false, true),
        // Pages for all blocks, the newest ones too.
        (128, 4, 1, true, false),
        (64, 3, 1, true, false),
        (128, 8, 2, true, false),
    ] {
        let shape = Attention { head_dim, group, queries, paged, stages: 2 };
        let mut batch = Batch::new(rig, shape, 2, if paged { 54 } else { MOST as usize }, apart, &positions)?;
        let kernel = rig.device.load(&rig.compiler, &shape)?;
        let live: Vec<usize> = (0..positions.len()).filter(|r| positions[*r] >= 0).collect();
        let want: Vec<f64> = live.iter().flat_map(|request| batch.reference(*request)).collect();
        for ctas in [1, 5, 264] {
            batch.device.out.fill(0xff)?;
            // Twice: the counters must be as they were.
            for _ in 0..2 {
                // SAFETY: the batch's buffers have the sizes that its shape asks for.
                unsafe { kernel.launch(&rig.stream, (ctas, 1), &batch.params())? };
            }
            let out = batch.device.out.read()?;
            let got =
                live.iter().flat_map(|request| floats(&out[request * batch.row_elements()..][..batch.row_elements()]));
            rig.compare(
                name::<Attention>(&format!("{shape:?}, tail {apart} x {ctas}")).replace("Attention ", ""),
                got,
                &want,
                5e-3,
            );
        }
    }
    Ok(())
}

const QWEN3_8B: Heads = Heads { head_dim: 128, kv_heads: 8, group: 4 };

pub fn time(rig: &mut Rig, bench: &KernelBench) -> Outcome<()> {
    for requests in [1, 8, 16, 32, 64, 92] {
        rig.push(bench.time_attention(QWEN3_8B, 2, requests, 128, false, None)?);
    }
    for ctas in [8, 16, 32, 64, 264] {
        rig.push(bench.time_attention(QWEN3_8B, 2, 1, 128, false, Some(ctas))?);
    }
    // Whole (request, KV head) pairs a CTA, and a CTA on each multiprocessor that a gather leaves.
    for (requests, ctas) in [(32, 256), (64, 256), (64, 127)] {
        rig.push(bench.time_attention(QWEN3_8B, 2, requests, 128, false, Some(ctas))?);
    }
    for requests in [1, 8, 32] {
        rig.push(bench.time_attention(QWEN3_8B, 1, requests, 1024, true, None)?);
    }
    Ok(())
}
