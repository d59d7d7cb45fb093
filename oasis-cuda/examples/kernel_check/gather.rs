//! The gather, alone and beside attention and scan.

use crate::rig::{Outcome, Rig, name, poisoned};
use crate::summaries::Form;
use oasis_cuda::device::{DeviceBuffer, PinnedBuffer};
use oasis_cuda::executor::GatherOptions;
use oasis_cuda::kernels::{CopyList, EntryCopy, Gather, GatherParams, LinkStamps};
use oasis_cuda::layout::entry_bytes;
use oasis_cuda::measure::Ceilings;
use oasis_cuda::measure::kernels::{GatherBeside, Heads, KernelBench};
use oasis_policies::summarizers::Quest;
use std::time::Instant;

/// Entries on the host, slots on the device and a list of copies between them.
struct Batch {
    host: PinnedBuffer,
    slots: DeviceBuffer<u8>,
    list: DeviceBuffer<CopyList>,
    copies: DeviceBuffer<EntryCopy>,
    /// `(entry on the host, slot)`; `None` where there is nothing to do.
    plan: Vec<Option<(usize, usize)>>,
}

impl Batch {
    fn new(rig: &mut Rig, entry: usize, entries: usize, slots: usize, copies: usize) -> Outcome<Self> {
        let mut host = rig.device.pinned(entries * entry, &|_| ())?;
        for word in host.as_mut_slice().chunks_exact_mut(8) {
            word.copy_from_slice(&rig.random.next().to_le_bytes());
        }
        let slot_memory = poisoned(&rig.device, slots * entry)?;
        let mut order: Vec<usize> = (0..slots).collect();
        let plan: Vec<Option<(usize, usize)>> = (0..copies)
            .map(|i| {
                let j = i + rig.random.below(slots - i);
                order.swap(i, j);
                (rig.random.below(50) > 0).then(|| (rig.random.below(entries), order[i]))
            })
            .collect();
        let list = [CopyList { count: copies as u32, ..CopyList::default() }];
        let address = |pair: &Option<(usize, usize)>| {
            pair.map_or_else(EntryCopy::default, |(from, to)| EntryCopy {
                from: host.address().offset(from * entry),
                to: slot_memory.address().offset(to * entry),
            })
        };
        let addresses: Vec<EntryCopy> = plan.iter().map(address).collect();
        let (list, copies) = (rig.device.upload(&list)?, rig.device.upload(&addresses)?);
        Ok(Self { host, slots: slot_memory, list, copies, plan })
    }

    fn params(&self) -> GatherParams {
        GatherParams::new(self.list.address(), self.copies.address())
    }

    /// The slots as they should be after the copies.
    fn expected(&self, entry: usize) -> Vec<u8> {
        let mut slots = vec![0xff; self.slots.len()];
        for (from, to) in self.plan.iter().flatten() {
            slots[to * entry..][..entry].copy_from_slice(&self.host.as_slice()[from * entry..][..entry]);
        }
        slots
    }
}

pub fn check(rig: &mut Rig) -> Outcome<()> {
    for head_dim in [64, 128] {
        let entry = entry_bytes(head_dim);
        for (stages, stores) in [(16, 8), (10, 5), (2, 1), (24, 8)] {
            let shape = Gather { head_dim, stages, stores, timed: false };
            let kernel = rig.device.load(&rig.compiler, &shape)?;
            for (ctas, copies) in [(1, 0), (3, 1), (1, 100), (4, 771), (48, 771)] {
                let mut batch = Batch::new(rig, entry, 500, 1000, copies)?;
                // SAFETY: list and copies name memory of the batch; both sides stay until the reads below.
                unsafe { kernel.launch(&rig.stream, (ctas, 1), &batch.params())? };
                let slots = batch.slots.read()?;
                let what = format!("d {head_dim} ring {stages}/{stores} x {ctas}, {copies} copies");
                rig.same(name::<Gather>(&what), &slots, &batch.expected(entry));
                rig.same(name::<Gather>(&format!("{what}: list")), &batch.list.read()?, &[CopyList::default()]);
                batch.list.fill(0)?;
            }
        }
        check_timed(rig, head_dim)?;
    }
    Ok(())
}

/// A timed gather copies the same and says how long it took: as long as its launch does, at most.
fn check_timed(rig: &mut Rig, head_dim: usize) -> Outcome<()> {
    let entry = entry_bytes(head_dim);
    let kernel = rig.device.load(&rig.compiler, &Gather { head_dim, stages: 16, stores: 8, timed: true })?;
    for (ctas, copies) in [(3, 0), (1, 100), (4, 771)] {
        let batch = Batch::new(rig, entry, 500, 1000, copies)?;
        let shared = rig.device.pinned(size_of::<LinkStamps>(), &|_| ())?;
        let params = GatherParams { stamps: shared.address(), ..batch.params() };
        rig.stream.synchronize()?;
        let launched = Instant::now();
        // SAFETY: list and copies name memory of the batch, the stamps are pinned; all of it stays until the reads below.
        unsafe { kernel.launch(&rig.stream, (ctas, 1), &params)? };
        rig.stream.synchronize()?;
        let took = launched.elapsed();
        let slots = batch.slots.read()?;
        let what = format!("d {head_dim}, timed, x {ctas}, {copies} copies");
        rig.same(name::<Gather>(&what), &slots, &batch.expected(entry));
        let stamps: LinkStamps = bytemuck::pod_read_unaligned(shared.as_slice());
        let nanos = u128::from(stamps.ended.saturating_sub(stamps.began));
        let is_right = match copies {
            0 => stamps == LinkStamps::default(),
            _ => stamps.entries == copies as u64 && (1..=took.as_nanos()).contains(&nanos),
        };
        rig.same(name::<Gather>(&format!("{what}: {nanos} of {} ns", took.as_nanos())), &[is_right], &[true]);
    }
    Ok(())
}

/// Copies of one layer: 64 requests, 8 KV heads, C = 6.
const COPIES: usize = 64 * 8 * 6;

pub fn time(rig: &mut Rig, bench: &KernelBench) -> Outcome<()> {
    let heads = Heads { head_dim: 128, kv_heads: 8, group: 4 };
    let link = Ceilings::measure(&rig.device)?.host_to_device;
    let list = bench.gather(heads.head_dim, COPIES, link)?;
    let options = |(stages, stores, ctas)| GatherOptions { ctas, stages, stores };
    for shape in [(16, 8, 2), (16, 8, 4), (10, 5, 4), (8, 4, 4), (2, 1, 24)] {
        rig.push(bench.time_gather(&list, options(shape))?);
    }
    let form = Form::new(&Quest {}, heads.head_dim)?;
    let attention = bench.decode_attention(heads, 2, 64, 128, false)?;
    let scan = bench.summary_scan(heads, 2, (64, 1024), (form.code, form.bytes))?;
    let multiprocessors = rig.device.facts.multiprocessors;
    for (ctas, gathers) in [
        (2 * multiprocessors, &[(16, 8, 4)][..]),
        (2 * multiprocessors - 12, &[(8, 4, 4), (16, 8, 4)]),
        (multiprocessors - 4, &[(8, 4, 3), (8, 4, 4), (4, 2, 8), (10, 5, 4), (16, 8, 3)]),
        (multiprocessors - 8, &[(8, 4, 4), (10, 5, 3), (16, 8, 3)]),
    ] {
        let beside = GatherBeside { attention: &attention, scan: &scan, ctas };
        for shape in gathers {
            rig.push(bench.time_gather_beside(&list, options(*shape), &beside)?);
        }
    }
    Ok(())
}
