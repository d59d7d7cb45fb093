//! Which requests choose again, against the rule of oasis-core.

use crate::rig::{Outcome, Rig, name, poisoned};
use half::bf16;
use oasis_core::geometry::HeadShape;
use oasis_core::policy::Correction;
use oasis_cuda::device::DeviceBuffer;
use oasis_cuda::kernels::{Address, Correct, CorrectParams};
use oasis_cuda::measure::kernels::KernelBench;

const RULE: Correction = Correction { min_similarity: 0.75 };
/// Further from the threshold than rounding reaches.
const CLEAR: f32 = 1e-3;

struct Batch {
    shape: Correct,
    requests: usize,
    kv_heads: usize,
    q: DeviceBuffer<bf16>,
    kept: DeviceBuffer<bf16>,
    position: DeviceBuffer<i32>,
    ranked: DeviceBuffer<i32>,
    blocks: DeviceBuffer<i32>,
    tile_start: DeviceBuffer<i32>,
    arrived: DeviceBuffer<u32>,
    corrected: DeviceBuffer<u64>,
}

impl Batch {
    fn new(rig: &Rig, shape: Correct, requests: usize, kv_heads: usize) -> Outcome<Self> {
        let elements = requests * kv_heads * shape.group * shape.head_dim;
        Ok(Self {
            shape,
            requests,
            kv_heads,
            q: poisoned(&rig.device, elements)?,
            kept: poisoned(&rig.device, elements)?,
            position: rig.device.zeros(requests)?,
            ranked: poisoned(&rig.device, requests)?,
            blocks: poisoned(&rig.device, requests)?,
            tile_start: poisoned(&rig.device, requests + 1)?,
            arrived: rig.device.zeros(1)?,
            corrected: rig.device.zeros(1)?,
        })
    }

    fn params(&self) -> CorrectParams {
        CorrectParams {
            q: self.q.address(),
            kept: self.kept.address(),
            position: self.position.address(),
            ranked: self.ranked.address(),
            blocks: self.blocks.address(),
            tile_start: self.tile_start.address(),
            arrived: self.arrived.address(),
            corrected: self.corrected.address(),
            requests: self.requests as i32,
            kv_heads: self.kv_heads as i32,
            min_similarity: RULE.min_similarity,
        }
    }
}

/// Queries of one request that are about as similar to `before` as the threshold asks for, but not nearly so; now and then
/// without a direction.
fn turned(rig: &mut Rig, shape: HeadShape, before: &[bf16]) -> Vec<bf16> {
    if rig.random.below(12) == 0 {
        let number = [0.0, f32::NAN, 1.0][rig.random.below(3)];
        return vec![bf16::from_f32(number); before.len()];
    }
    let floats = |values: &[bf16]| values.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    loop {
        let noise = [0.0, 0.2, 0.6, 1.2][rig.random.below(4)];
        let length = 0.5 + rig.random.float().abs();
        let now: Vec<bf16> =
            before.iter().map(|x| bf16::from_f32((x.to_f32() + noise * rig.random.float()) * length)).collect();
        let due = |by: f32| {
            let rule = Correction { min_similarity: RULE.min_similarity + by };
            rule.is_due(shape, &floats(before), &floats(&now))
        };
        if due(-CLEAR) == due(CLEAR) {
            return now;
        }
    }
}

fn check_run(rig: &mut Rig, head_dim: usize, group: usize, requests: usize, kv_heads: usize) -> Outcome<()> {
    let shape = Correct { head_dim, group };
    let kernel = rig.device.load(&rig.compiler, &shape)?;
    let mut batch = Batch::new(rig, shape, requests, kv_heads)?;
    let head = HeadShape { group, head_dim, block_tokens: 16 };
    let width = kv_heads * group * head_dim;
    let floats = |values: &[bf16]| values.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    let bits = |values: &[bf16]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let mut kept = rig.random.bf16s(requests * width);
    batch.kept.write(&kept)?;
    let mut corrected = 0;
    let what = format!("d {head_dim} group {group}, {requests} requests of {kv_heads}");
    for step in 0..4 {
        let q: Vec<bf16> = kept.chunks_exact(width).flat_map(|before| turned(rig, head, before)).collect();
        let position: Vec<i32> = (0..requests).map(|_| rig.random.below(5000) as i32 - 1).collect();
        batch.q.write(&q)?;
        batch.position.write(&position)?;
        // The third keeps queries and does nothing else.
        let keeps_only = step == 2;
        let none =
            CorrectParams { ranked: Address::NONE, blocks: Address::NONE, tile_start: Address::NONE, ..batch.params() };
        let params = if keeps_only { none } else { batch.params() };
        if keeps_only {
            batch.ranked.fill(0x11)?;
        }
        // SAFETY: the buffers have the sizes that the parameters ask for.
        unsafe { kernel.launch(&rig.stream, (requests as u32, 1), &params)? };
        let (mut ranked, mut blocks, mut tiles) = (Vec::new(), Vec::new(), vec![0]);
        for request in 0..requests {
            let (place, position) = (request * width..(request + 1) * width, position[request]);
            let due = position >= 0 && RULE.is_due(head, &floats(&kept[place.clone()]), &floats(&q[place.clone()]));
            let count = if due { position / 16 } else { 0 };
            corrected += u64::from(count > 0 && !keeps_only);
            ranked.push(match (keeps_only, count) {
                (true, _) => 0x1111_1111,
                (false, 0) => -1,
                (false, count) => count * 16,
            });
            blocks.push(count);
            tiles.push(tiles[request] + (count + 15) / 16);
            if position >= 0 {
                kept[place.clone()].copy_from_slice(&q[place]);
            }
        }
        rig.same(name::<Correct>(&format!("{what}, step {step}: kept")), &bits(&batch.kept.read()?), &bits(&kept));
        rig.same(name::<Correct>(&format!("{what}, step {step}: ranked")), &batch.ranked.read()?, &ranked);
        if !keeps_only {
            rig.same(name::<Correct>(&format!("{what}, step {step}: blocks")), &batch.blocks.read()?, &blocks);
            rig.same(name::<Correct>(&format!("{what}, step {step}: tiles")), &batch.tile_start.read()?, &tiles);
        }
        let counters = [batch.corrected.read()?[0], batch.arrived.read()?[0].into()];
        rig.same(name::<Correct>(&format!("{what}, step {step}: counters")), &counters, &[corrected, 0]);
    }
    Ok(())
}

pub fn check(rig: &mut Rig) -> Outcome<()> {
    for head_dim in [64, 128] {
        for (group, requests, kv_heads) in [(1, 1, 1), (4, 5, 8), (7, 33, 3), (16, 64, 2), (3, 300, 9)] {
            check_run(rig, head_dim, group, requests, kv_heads)?;
        }
    }
    Ok(())
}

pub fn time(rig: &mut Rig, _: &KernelBench) -> Outcome<()> {
    for requests in [1, 8, 64] {
        let batch = Batch::new(rig, Correct { head_dim: 128, group: 4 }, requests, 8)?;
        let kernel = rig.device.load(&rig.compiler, &batch.shape)?;
        // SAFETY: the buffers have the sizes that the parameters ask for.
        let micros = unsafe { rig.micros(20, |_| kernel.launch(&rig.stream, (requests as u32, 1), &batch.params()))? };
        rig.record(name::<Correct>(&format!("batch {requests}, 8 x 4 x 128")), micros, 0.0, "bound by its launch");
    }
    Ok(())
}
