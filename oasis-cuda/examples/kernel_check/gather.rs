//! The gather, alone and beside attention and scan.

use crate::rig::{Outcome, Rig, name, poisoned};
use crate::{attention, scan};
use oasis_cuda::device::{DeviceBuffer, Kernel, PinnedBuffer, Priority, Stream};
use oasis_cuda::kernels::{CopyList, EntryCopy, Gather, GatherParams};
use oasis_cuda::layout::entry_bytes;

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
        GatherParams { list: self.list.address(), copies: self.copies.address() }
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
            let shape = Gather { head_dim, stages, stores };
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
    }
    Ok(())
}

/// Copies of one layer: 64 requests, 8 KV heads, C = 6.
const COPIES: usize = 64 * 8 * 6;

/// Queues `count` gathers of the whole list.
fn queue(
    stream: &Stream,
    kernel: &Kernel<Gather>,
    ctas: u32,
    lists: &[DeviceBuffer<CopyList>],
    batch: &Batch,
) -> Outcome<()> {
    for list in lists {
        let params = GatherParams { list: list.address(), ..batch.params() };
        // SAFETY: as in `check`; every launch has a list of its own, since a list is empty afterwards.
        unsafe { kernel.launch(stream, (ctas, 1), &params)? };
    }
    Ok(())
}

fn lists(rig: &Rig, count: usize) -> Outcome<Vec<DeviceBuffer<CopyList>>> {
    let list = [CopyList { count: COPIES as u32, ..CopyList::default() }];
    Ok((0..count).map(|_| rig.device.upload(&list)).collect::<Result<_, _>>()?)
}

pub fn time(rig: &mut Rig) -> Outcome<()> {
    let mut batch = Batch::new(rig, 8192, 65_536, 65_536, COPIES)?;
    // All of them real, for the figures.
    let every = batch.copies.read()?;
    let real: Vec<EntryCopy> = every.iter().copied().filter(|copy| copy.from.0 != 0).collect();
    let padded: Vec<EntryCopy> = real.iter().copied().cycle().take(COPIES).collect();
    batch.copies.write(&padded)?;
    let bytes = (COPIES * 8192) as f64;
    let high = rig.device.stream(Priority::High)?;
    let link = copy_engine(rig, &batch)?;
    rig.record(
        "pinned host to device, copy engine: floor of the gather",
        bytes / link,
        bytes / link,
        format!("{:.1} GB/s", link / 1e3),
    );

    for (stages, stores, ctas) in [(16, 8, 2), (16, 8, 4), (10, 5, 4), (8, 4, 4), (2, 1, 24)] {
        let kernel = rig.device.load(&rig.compiler, &Gather { head_dim: 128, stages, stores })?;
        let lists = lists(rig, 11)?;
        queue(&high, &kernel, ctas, &lists[..1], &batch)?;
        let (start, end) = (rig.device.event()?, rig.device.event()?);
        high.record(&start)?;
        queue(&high, &kernel, ctas, &lists[1..], &batch)?;
        high.record(&end)?;
        high.synchronize()?;
        let micros = start.micros_until(&end)? / 10.0;
        rig.record(
            format!("gather alone, ring {stages}/{stores} x {ctas}, 8 KiB entries"),
            micros,
            bytes / link,
            format!("{:.1} GB/s", bytes / micros / 1e3),
        );
    }
    beside(rig, &batch, &high, bytes, link)
}

/// Bytes a microsecond of the copy engine from pinned memory.
fn copy_engine(rig: &mut Rig, batch: &Batch) -> Outcome<f64> {
    let source = &batch.host.as_slice()[..PinnedBuffer::CHUNK];
    let mut target = rig.device.zeros::<u8>(source.len())?;
    let mut best = f64::MAX;
    for _ in 0..3 {
        let start = std::time::Instant::now();
        target.write(source)?;
        best = best.min(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(target.len() as f64 / best)
}

fn beside(rig: &mut Rig, batch: &Batch, high: &Stream, bytes: f64, link: f64) -> Outcome<()> {
    let (attention, scan) = (attention::Foreground::new(rig)?, scan::Foreground::new(rig)?);
    let multiprocessors = rig.device.facts.multiprocessors;
    let mut fastest = f64::MAX;
    for (foreground_ctas, gathers) in [
        (2 * multiprocessors, &[(16, 8, 4)][..]),
        (2 * multiprocessors - 12, &[(8, 4, 4), (16, 8, 4)]),
        (multiprocessors - 4, &[(8, 4, 3), (8, 4, 4), (4, 2, 8), (10, 5, 4), (16, 8, 3)]),
        (multiprocessors - 8, &[(8, 4, 4), (10, 5, 3), (16, 8, 3)]),
    ] {
        let layers = 40;
        let graph = rig.stream.capture(|| {
            (0..layers).try_for_each(|i| {
                attention.launch(rig, i, foreground_ctas)?;
                scan.launch(rig, i, foreground_ctas)
            })
        })?;
        let (start, end) = (rig.device.event()?, rig.device.event()?);
        let foreground = |rig: &Rig| -> Outcome<()> {
            rig.stream.record(&start)?;
            // SAFETY: the captured launches use what `attention` and `scan` hold.
            unsafe { graph.launch(&rig.stream)? };
            Ok(rig.stream.record(&end)?)
        };
        let mut alone = Vec::new();
        for _ in 0..5 {
            foreground(rig)?;
            rig.stream.synchronize()?;
            alone.push(start.micros_until(&end)? / layers as f64);
        }
        alone.sort_by(f64::total_cmp);
        let alone = alone[2];
        fastest = fastest.min(alone);
        for (stages, stores, ctas) in gathers.iter().copied() {
            let kernel = rig.device.load(&rig.compiler, &Gather { head_dim: 128, stages, stores })?;
            // Gathers that begin before the foreground and end after it; those in the middle are timed.
            let lists = lists(rig, 40)?;
            let marks: Vec<_> = (0..=lists.len()).map(|_| rig.device.event()).collect::<Result<_, _>>()?;
            high.record(&marks[0])?;
            for (i, list) in lists.iter().enumerate() {
                queue(high, &kernel, ctas, std::slice::from_ref(list), batch)?;
                high.record(&marks[i + 1])?;
                if i == 1 {
                    foreground(rig)?;
                }
            }
            rig.device.synchronize()?;
            let slowed = start.micros_until(&end)? / layers as f64;
            let (from, to) = (marks[0].micros_until(&start)?, marks[0].micros_until(&end)?);
            let inside = |i: &usize| -> Outcome<bool> {
                Ok(marks[0].micros_until(&marks[*i])? > from && marks[0].micros_until(&marks[*i + 1])? < to)
            };
            let mut timed = Vec::new();
            for i in 0..lists.len() {
                if inside(&i)? {
                    timed.push(marks[i].micros_until(&marks[i + 1])?);
                }
            }
            let micros = timed.iter().sum::<f64>() / timed.len().max(1) as f64;
            rig.record(
                format!("gather {stages}/{stores} x {ctas} beside attention + scan x {foreground_ctas}"),
                micros,
                bytes / link,
                format!(
                    "{:.1} GB/s over {} lists; foreground {alone:.1} -> {slowed:.1} us a layer (+{:.1}%; fastest alone {fastest:.1})",
                    bytes / micros / 1e3,
                    timed.len(),
                    (slowed / alone - 1.0) * 100.0
                ),
            );
        }
    }
    Ok(())
}
