//! How fast scattered entries cross the link, and the gather's shape that carries them fastest.

use crate::compile::user_cache;
use crate::device::{Device, DeviceBuffer, DeviceError, MemoryCopy, PinnedBuffer, Priority, Stream};
use crate::executor::GatherOptions;
use crate::gemm::cache;
use crate::kernels::{self, CopyList, EntryCopy, Gather, GatherParams, StreamParams};
use crate::layout::entry_bytes;
use crate::probe::driver_version;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Instant;

/// Bytes a second of scattered entries, pinned host memory to the device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EntryRates {
    /// Bytes of an entry.
    pub entry_bytes: usize,
    /// CTAs of the gather.
    pub gather_ctas: u32,
    /// Entries of a CTA's ring.
    pub gather_depth: usize,
    /// The gather with the device to itself.
    pub gather: f64,
    /// The gather beside a kernel that keeps the device's memory busy.
    pub gather_beside: f64,
    /// The copy engine, one copy queued for each entry.
    pub copy_engine: f64,
    /// The copy engine, all copies queued in one call; `None` for a driver that has none.
    pub copy_engine_batch: Option<f64>,
}

impl EntryRates {
    /// Measures entries of heads of `head_dim` elements, for a fraction of a second.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver, or without NVRTC.
    pub fn measure(device: &Device, head_dim: usize, gather: GatherOptions) -> Result<Self, DeviceError> {
        let rig = Rig::new(device, head_dim)?;
        let batch = match Stream::takes_batches() {
            // SAFETY: the copies are the rig's own, and are waited for.
            true => Some(rig.copy_engine(|copies| unsafe { rig.stream.copy_all(copies) })?),
            false => None,
        };
        let one_by_one = |copies: &[MemoryCopy]| {
            // SAFETY: as above.
            copies.iter().try_for_each(|copy| unsafe { rig.stream.copy(copy.to, copy.from, copy.bytes) })
        };
        Ok(Self {
            entry_bytes: entry_bytes(head_dim),
            gather_ctas: gather.ctas,
            gather_depth: gather.stages,
            gather: rig.gather(gather, false)?,
            gather_beside: rig.gather(gather, true)?,
            copy_engine: rig.copy_engine(one_by_one)?,
            copy_engine_batch: batch,
        })
    }
}

/// All that a choice depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    device: String,
    driver: String,
    head_dim: usize,
    ctas: Option<u32>,
    depth: Option<usize>,
}

/// The gather's shape for entries of heads of `head_dim` elements: what is given of it, and for the rest what is
/// fastest beside a kernel that keeps the device's memory busy. Measured once, in a second, and remembered on disk.
///
/// # Errors
/// [`DeviceError`] from the driver, or without NVRTC.
pub fn gather_options(
    device: &Device,
    head_dim: usize,
    ctas: Option<u32>,
    depth: Option<usize>,
) -> Result<GatherOptions, DeviceError> {
    if let (Some(ctas), Some(stages)) = (ctas, depth) {
        return Ok(options(ctas, stages));
    }
    let key = Key { device: device.facts.name.clone(), driver: driver_version(), head_dim, ctas, depth };
    let folder = user_cache().map(|folder| folder.join("gather"));
    let remembered = |folder: &Path| cache::get::<Key, (u32, usize)>(folder, &key);
    if let Some((ctas, stages)) = folder.as_deref().and_then(remembered) {
        return Ok(options(ctas, stages));
    }
    let rig = Rig::new(device, head_dim)?;
    // Beside plain reads 3 are often as fast, but beside whole steps they carried 44.8 GB/s where 5 carried 47.0.
    let all_ctas = ctas.map_or(vec![5, 6, 8], |ctas| vec![ctas]);
    let depths = depth.map_or(vec![8, 16], |depth| vec![depth]);
    let mut rates = Vec::new();
    for ctas in all_ctas {
        for &stages in &depths {
            let rate = rig.gather(options(ctas, stages), true)?;
            tracing::debug!(ctas, stages, rate, "gather");
            rates.push((options(ctas, stages), rate));
        }
    }
    let best = smallest_of_the_fast(&rates);
    if let Some(folder) = &folder {
        // A cache that cannot be written costs time, not the run.
        let _ = cache::put(folder, &key, &(best.ctas, best.stages));
    }
    Ok(best)
}

fn options(ctas: u32, stages: usize) -> GatherOptions {
    GatherOptions { ctas, stages, stores: stages / 2 }
}

/// The one with the fewest CTAs, then the shortest ring, of those that are about as fast as any: each CTA takes a
/// multiprocessor from the foreground.
fn smallest_of_the_fast(rates: &[(GatherOptions, f64)]) -> GatherOptions {
    let best = rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    (rates.iter().filter(|(_, rate)| *rate >= 0.98 * best).map(|(options, _)| *options))
        .min_by_key(|options| (options.ctas, options.stages))
        .unwrap_or_default()
}

/// Entries that are copied at a time.
const ENTRIES: usize = 2048;
/// Runs of which the fastest counts: the host may be busy with something else.
const RUNS: usize = 6;
/// Gathers that are timed together, after a first one.
const TIMED: usize = 6;
/// Reads of device memory, each of [`FOREGROUND_BYTES`], that outlast the gathers.
const READS: usize = 48;
const FOREGROUND_BYTES: usize = 1 << 30;

/// Entries all over some host memory, and slots for them on the device.
struct Rig<'a> {
    device: &'a Device,
    head_dim: usize,
    stream: Stream,
    foreground: Stream,
    host: PinnedBuffer,
    slots: DeviceBuffer<u8>,
    data: DeviceBuffer<u8>,
    sum: DeviceBuffer<u32>,
}

impl<'a> Rig<'a> {
    fn new(device: &'a Device, head_dim: usize) -> Result<Self, DeviceError> {
        let data = FOREGROUND_BYTES.min(device.memory()?.0 / 4) / 4096 * 4096;
        Ok(Self {
            device,
            head_dim,
            stream: device.stream(Priority::High)?,
            foreground: device.stream(Priority::Middle)?,
            host: device.pinned(64 << 20, &|_| ())?,
            slots: device.zeros(ENTRIES * entry_bytes(head_dim))?,
            data: device.zeros(data)?,
            sum: device.zeros(1)?,
        })
    }

    fn bytes(&self) -> f64 {
        self.slots.bytes() as f64
    }

    fn copies(&self) -> Vec<EntryCopy> {
        let entry = entry_bytes(self.head_dim);
        let entries = self.host.as_slice().len() / entry;
        // A multiplier without a common factor: every entry has a place of its own, far from its neighbours'.
        let from = |i: usize| self.host.address().offset(i * 2741 % entries * entry);
        (0..ENTRIES).map(|i| EntryCopy { from: from(i), to: self.slots.address().offset(i * entry) }).collect()
    }

    /// Bytes a second of a gather, alone or beside a foreground, the best run.
    fn gather(&self, options: GatherOptions, beside: bool) -> Result<f64, DeviceError> {
        let compiler = self.device.compiler()?;
        let GatherOptions { ctas, stages, stores } = options;
        let gather = self.device.load(&compiler, &Gather { head_dim: self.head_dim, stages, stores, timed: false })?;
        let read = self.device.load(&compiler, &kernels::Stream)?;
        let copies = self.device.upload(&self.copies())?;
        let full = vec![CopyList { count: ENTRIES as u32, ..CopyList::default() }; TIMED + 1];
        let mut lists: DeviceBuffer<CopyList> = self.device.zeros(full.len())?;
        let multiprocessors = self.device.facts.multiprocessors;
        let reading =
            StreamParams { data: self.data.address(), count: (self.data.bytes() / 16) as u64, sum: self.sum.address() };
        let (start, end) = (self.device.event()?, self.device.event()?);
        let mut best = f64::MAX;
        for _ in 0..RUNS {
            lists.write(&full)?;
            for _ in 0..if beside { READS } else { 0 } {
                let grid = (2 * multiprocessors.saturating_sub(ctas).max(1), 1);
                // SAFETY: `data` has `count` units and `sum` one element; both are waited for below.
                unsafe { read.launch(&self.foreground, grid, &reading)? };
            }
            for index in 0..full.len() {
                let list = lists.address().offset(index * size_of::<CopyList>());
                let params = GatherParams::new(list, copies.address());
                // SAFETY: list and copies name entries of the rig; all of it is waited for below.
                unsafe { gather.launch(&self.stream, (ctas, 1), &params)? };
                if index == 0 {
                    self.stream.record(&start)?;
                }
            }
            self.stream.record(&end)?;
            self.device.synchronize()?;
            best = best.min(start.micros_until(&end)? / TIMED as f64);
        }
        Ok(self.bytes() / best * 1e6)
    }

    /// Bytes a second of copies that `queue` queues, the host's time included, the best run.
    fn copy_engine(&self, queue: impl Fn(&[MemoryCopy]) -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
        let bytes = entry_bytes(self.head_dim);
        let copies: Vec<MemoryCopy> =
            self.copies().iter().map(|copy| MemoryCopy { from: copy.from, to: copy.to, bytes }).collect();
        let mut best = f64::MAX;
        for _ in 0..RUNS {
            self.stream.synchronize()?;
            let start = Instant::now();
            queue(&copies)?;
            self.stream.synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(self.bytes() / best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_little_speed_is_given_for_fewer_multiprocessors() {
        let rates = [(options(2, 16), 35.0), (options(3, 16), 48.5), (options(4, 8), 47.9), (options(8, 8), 49.0)];
        assert_eq!(smallest_of_the_fast(&rates), options(3, 16));
        assert_eq!(smallest_of_the_fast(&rates[..1]), options(2, 16));
        let rates = [(options(3, 16), 49.0), (options(3, 8), 48.9)];
        assert_eq!(smallest_of_the_fast(&rates), options(3, 8));
    }
}
