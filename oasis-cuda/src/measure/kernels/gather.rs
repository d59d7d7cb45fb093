//! The gather, alone and beside attention and scan.

use super::{DecodeAttention, KernelBench, KernelTime, SummaryScan};
use crate::device::{Device, DeviceBuffer, DeviceError, Event, PinnedBuffer, Priority, Stream};
use crate::executor::GatherOptions;
use crate::kernels::{CopyList, EntryCopy, Gather, GatherParams};
use crate::layout::entry_bytes;

/// Bytes of pinned memory over which entries are spread.
const HOST_BYTES: usize = 512 << 20;
/// Gathers that are timed together when nothing runs beside them, after a first one.
const ALONE: usize = 10;
/// Layers of the foreground that gathers run beside.
const LAYERS: usize = 40;

/// Entries all over some host memory, and a list of copies to slots.
pub struct GatherBench {
    head_dim: usize,
    copies: usize,
    /// Bytes a second of the copy engine: the gather's ceiling.
    link: f64,
    high: Stream,
    _host: PinnedBuffer,
    _slots: DeviceBuffer<u8>,
    list: DeviceBuffer<EntryCopy>,
}

/// What gathers run beside: a layer's attention, then its scan.
pub struct GatherBeside<'a> {
    /// Attention.
    pub attention: &'a DecodeAttention,
    /// Scan.
    pub scan: &'a SummaryScan,
    /// CTAs of both.
    pub ctas: u32,
}

impl GatherBench {
    fn bytes(&self) -> f64 {
        (self.copies * entry_bytes(self.head_dim)) as f64
    }

    fn lists(&self, device: &Device, count: usize) -> Result<DeviceBuffer<CopyList>, DeviceError> {
        device.upload(&vec![CopyList { count: self.copies as u32, ..CopyList::default() }; count])
    }

    fn name(&self, options: GatherOptions) -> String {
        let GatherOptions { ctas, stages, stores } = options;
        let kib = entry_bytes(self.head_dim) / 1024;
        format!("gather, {} entries of {kib} KiB, ring {stages}/{stores} x {ctas}", self.copies)
    }
}

impl KernelBench {
    /// A list of `copies` entries of heads of `head_dim` elements; `link` is the copy engine's bytes a second.
    ///
    /// # Errors
    /// [`DeviceError`] when there is not that much memory.
    pub fn gather(&self, head_dim: usize, copies: usize, link: f64) -> Result<GatherBench, DeviceError> {
        let (device, entry) = (&self.device, entry_bytes(head_dim));
        let host = device.pinned(HOST_BYTES, &|_| ())?;
        let slots: DeviceBuffer<u8> = device.zeros(copies * entry)?;
        let entries = HOST_BYTES / entry;
        // A multiplier without a common factor: neighbours in the list are far from each other.
        let from = |i: usize| host.address().offset(i * 2741 % entries * entry);
        let list: Vec<EntryCopy> =
            (0..copies).map(|i| EntryCopy { from: from(i), to: slots.address().offset(i * entry) }).collect();
        let list = device.upload(&list)?;
        Ok(GatherBench {
            head_dim,
            copies,
            link,
            high: device.stream(Priority::High)?,
            _host: host,
            _slots: slots,
            list,
        })
    }

    /// Times the gather with the device to itself.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn time_gather(&self, bench: &GatherBench, options: GatherOptions) -> Result<KernelTime, DeviceError> {
        let lists = bench.lists(&self.device, ALONE + 1)?;
        let (start, end) = (self.device.event()?, self.device.event()?);
        self.queue_gather(bench, options, &lists, |launch| match launch {
            0 => bench.high.record(&start),
            ALONE => bench.high.record(&end),
            _ => Ok(()),
        })?;
        bench.high.synchronize()?;
        let micros = start.micros_until(&end)? / ALONE as f64;
        let figure = format!("{:.1} GB/s", bench.bytes() / micros / 1e3);
        Ok(KernelTime::new(bench.name(options) + ", alone", micros, Some(bench.bytes() / bench.link * 1e6), figure))
    }

    /// Times the gather beside a foreground, and what that costs the foreground.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn time_gather_beside(
        &self,
        bench: &GatherBench,
        options: GatherOptions,
        beside: &GatherBeside<'_>,
    ) -> Result<KernelTime, DeviceError> {
        let graph = self.stream.capture(|| {
            (0..LAYERS).try_for_each(|layer| {
                beside.attention.launch(&self.stream, layer, beside.ctas)?;
                beside.scan.launch(&self.stream, layer, beside.ctas)
            })
        })?;
        let (start, end) = (self.device.event()?, self.device.event()?);
        let foreground = |repeats: usize| -> Result<(), DeviceError> {
            self.stream.record(&start)?;
            for _ in 0..repeats {
                // SAFETY: the captured launches use what `attention` and `scan` hold, which are borrowed.
                unsafe { graph.launch(&self.stream)? };
            }
            self.stream.record(&end)
        };
        let mut alone = Vec::new();
        for _ in 0..5 {
            foreground(1)?;
            self.stream.synchronize()?;
            alone.push(start.micros_until(&end)? / LAYERS as f64);
        }
        alone.sort_by(f64::total_cmp);
        let alone = alone[2];
        // Gathers that begin before the foreground and end after it; those in the middle, eight or more, are timed.
        let expected = bench.bytes() / bench.link * 1e6;
        let repeats = (16.0 * expected / (alone * LAYERS as f64)).ceil() as usize;
        let layers = (repeats * LAYERS) as f64;
        let count = 8 + (2.0 * alone * layers / expected) as usize;
        let lists = bench.lists(&self.device, count)?;
        let marks: Vec<Event> = (0..=count).map(|_| self.device.event()).collect::<Result<_, _>>()?;
        bench.high.record(&marks[0])?;
        self.queue_gather(bench, options, &lists, |launch| {
            bench.high.record(&marks[launch + 1])?;
            if launch == 1 { foreground(repeats) } else { Ok(()) }
        })?;
        self.device.synchronize()?;
        let slowed = start.micros_until(&end)? / layers;
        let (from, to) = (marks[0].micros_until(&start)?, marks[0].micros_until(&end)?);
        let mut timed = Vec::new();
        for pair in marks.windows(2) {
            if marks[0].micros_until(&pair[0])? > from && marks[0].micros_until(&pair[1])? < to {
                timed.push(pair[0].micros_until(&pair[1])?);
            }
        }
        let micros = timed.iter().sum::<f64>() / timed.len() as f64;
        let figure = format!(
            "{:.1} GB/s; attention + scan x {} CTAs {alone:.1} -> {slowed:.1} us a layer (+{:.1}%)",
            bench.bytes() / micros / 1e3,
            beside.ctas,
            (slowed / alone - 1.0) * 100.0
        );
        Ok(KernelTime::new(bench.name(options) + ", beside attention and scan", micros, Some(expected), figure))
    }

    /// Queues one gather a list, and calls `after` with its number.
    fn queue_gather(
        &self,
        bench: &GatherBench,
        options: GatherOptions,
        lists: &DeviceBuffer<CopyList>,
        after: impl Fn(usize) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let GatherOptions { ctas, stages, stores } = options;
        let kernel =
            self.device.load(&self.compiler, &Gather { head_dim: bench.head_dim, stages, stores, timed: false })?;
        for launch in 0..lists.len() {
            let list = lists.address().offset(launch * size_of::<CopyList>());
            // SAFETY: the list names memory of the bench; every launch has a list of its own, since a list is empty
            // afterwards; the kernel's drop waits for the device.
            unsafe { kernel.launch(&bench.high, (ctas, 1), &GatherParams::new(list, bench.list.address()))? };
            after(launch)?;
        }
        Ok(())
    }
}
