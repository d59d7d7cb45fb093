//! How fast planned entries cross the link, for selectors that follow it: of the host, and of the device.

use crate::device::{Device, DeviceBuffer, DeviceError, Event, PinnedBuffer, Stream};
use crate::kernels::{Address, LinkStamps};
use oasis_core::ids::{LayerId, Step};
use oasis_core::pipeline::LinkMeter;
use oasis_core::policy::{LinkRate, Selector};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Times the transfers of each layer between two events; they are read when the layer's turn comes again.
pub(super) struct LinkTimer {
    meter: LinkMeter,
    /// `[layers]`
    transfers: Vec<Transfer>,
}

struct Transfer {
    start: Event,
    end: Event,
    /// Entries that are planned or under way; 0 once the time was read.
    entries: usize,
    /// Whether the events have yet to be recorded for them.
    is_ahead: Cell<bool>,
}

impl LinkTimer {
    pub fn new(device: &Device, layers: usize) -> Result<Self, DeviceError> {
        let transfer =
            || Ok(Transfer { start: device.event()?, end: device.event()?, entries: 0, is_ahead: Cell::default() });
        Ok(Self { meter: LinkMeter::default(), transfers: (0..layers).map(|_| transfer()).collect::<Result<_, _>>()? })
    }

    /// A layer is about to be selected: gives what was measured so far.
    pub fn selecting(&mut self, layer: LayerId, step: Step) -> Result<Option<LinkRate>, DeviceError> {
        self.meter.selecting(layer, step, Instant::now());
        let transfer = &mut self.transfers[layer.index()];
        if transfer.entries > 0 && !transfer.is_ahead.get() && transfer.end.is_done()? {
            let micros = transfer.start.micros_until(&transfer.end)?;
            self.meter.carried(transfer.entries, Duration::from_secs_f64(micros.max(0.0) / 1e6));
            transfer.entries = 0;
        }
        Ok(self.meter.rate())
    }

    /// The next transfer of a layer brings so many entries over the link.
    pub fn planned(&mut self, layer: LayerId, entries: usize) {
        let transfer = &mut self.transfers[layer.index()];
        transfer.entries = entries;
        transfer.is_ahead.set(entries > 0);
    }

    /// A layer's transfer is about to be queued.
    pub fn begin(&self, layer: usize, stream: &Stream) -> Result<(), DeviceError> {
        // A transfer that brings nothing says nothing of the link, and must not write over the times of one that did.
        let transfer = &self.transfers[layer];
        if transfer.is_ahead.get() { stream.record(&transfer.start) } else { Ok(()) }
    }

    /// It was queued.
    pub fn end(&self, layer: usize, stream: &Stream) -> Result<(), DeviceError> {
        let transfer = &self.transfers[layer];
        if transfer.is_ahead.replace(false) { stream.record(&transfer.end) } else { Ok(()) }
    }
}

/// The cap of a selector that the device runs and whose cap follows the link. Kernels write down when they work, in memory
/// that the host reads between steps; the cap of the next step is copied to the device by the step itself, so that a
/// captured one stays as it is.
pub(super) struct LinkFollower {
    selector: Box<dyn Selector>,
    budget: usize,
    cap: usize,
    kv_heads: usize,
    meter: LinkMeter,
    /// When the executor started: device times are told from here.
    start: Instant,
    /// The cap of the next step, u32, and from [`STAMPS`] on [`LinkStamps`] `[layers]`.
    shared: PinnedBuffer,
    /// u32 `[1]`: the cap of the step under way.
    link_cap: DeviceBuffer<u32>,
}

/// Where stamps begin, in bytes.
const STAMPS: usize = 64;

impl LinkFollower {
    /// For at most `cap` admissions of each of `kv_heads` KV heads of a row, with a working set of `budget` slots.
    pub fn new(
        device: &Device,
        selector: Box<dyn Selector>,
        (budget, cap): (usize, usize),
        (layers, kv_heads): (usize, usize),
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            selector,
            budget,
            cap,
            kv_heads,
            meter: LinkMeter::default(),
            start: Instant::now(),
            shared: device.pinned(STAMPS + layers * size_of::<LinkStamps>(), &|_| ())?,
            link_cap: device.zeros(1)?,
        })
    }

    /// A step of `rows` rows is about to be launched: nothing of the one before is under way.
    pub fn begin(&mut self, rows: usize) {
        let cap = cap_of_step(&*self.selector, self.budget, self.cap, rows * self.kv_heads, self.meter.rate());
        self.shared.as_mut_slice()[..4].copy_from_slice(&cap.to_ne_bytes());
    }

    /// It is done.
    pub fn end(&mut self, step: Step) {
        let stamps = bytemuck::cast_slice_mut(&mut self.shared.as_mut_slice()[STAMPS..]);
        hear(&self.meter, self.start, step, stamps);
    }

    /// The cap of the last step, and what was measured so far.
    pub fn last(&self) -> (usize, Option<LinkRate>) {
        let cap: u32 = bytemuck::pod_read_unaligned(&self.shared.as_slice()[..4]);
        (cap as usize, self.meter.rate())
    }

    /// Queues what brings the cap of a step to the device.
    pub fn queue_cap(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both sides hold a number; the host changes its own between steps, and selections of the step before are
        // done.
        unsafe { stream.copy(self.link_cap(), self.shared.address(), size_of::<u32>()) }
    }

    /// Where selections find the cap.
    pub fn link_cap(&self) -> Address {
        self.link_cap.address()
    }

    /// Where a layer's kernels write their times.
    pub fn stamps(&self, layer: usize) -> Address {
        self.shared.address().offset(STAMPS + layer * size_of::<LinkStamps>())
    }
}

/// The cap of a step whose batch has `heads` KV heads.
fn cap_of_step(selector: &dyn Selector, budget: usize, most: usize, heads: usize, link: Option<LinkRate>) -> u32 {
    selector.cap_by_link(budget, heads, link).map_or(most, |cap| cap.min(most)) as u32
}

/// Tells `meter` what the kernels of a step have written down, `[layers]`, as if their clock had begun at `start`.
fn hear(meter: &LinkMeter, start: Instant, step: Step, stamps: &mut [LinkStamps]) {
    let Some(first) = stamps.first().map(|stamps| stamps.selected) else { return };
    for (layer, stamps) in stamps.iter_mut().enumerate() {
        let since = Duration::from_nanos(stamps.selected.saturating_sub(first));
        meter.selecting(LayerId::from(layer), step, start + since);
        // What is left to the next step is written down there.
        let entries = std::mem::take(&mut stamps.entries);
        if entries > 0 {
            meter.carried(entries as usize, Duration::from_nanos(stamps.ended.saturating_sub(stamps.began)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::policy::SelectorSpec;
    use oasis_policies::selectors::{AdaptiveCap, CappedLru};

    fn stamps(selected: u64, micros: u64, entries: u64) -> LinkStamps {
        LinkStamps { selected, began: 7_000, ended: 7_000 + micros * 1_000, entries }
    }

    #[test]
    fn what_kernels_write_down_is_heard_once() {
        let (meter, start) = (LinkMeter::default(), Instant::now());
        // Selections 200 us apart; the middle layer carried nothing.
        let mut step = [stamps(1_000_000, 50, 10), stamps(1_200_000, 999, 0), stamps(1_400_000, 100, 20)];
        hear(&meter, start, Step(1), &mut step);
        let rate = LinkRate { entry: Duration::from_micros(5), interval: Duration::from_micros(200) };
        assert_eq!(meter.rate(), Some(rate));
        assert_eq!(step.map(|stamps| stamps.entries), [0; 3]);
        // A later step in which no gather carried anything changes what is known of selections alone.
        step.iter_mut().for_each(|stamps| stamps.selected = 9_000_000 + (stamps.selected - 1_000_000) * 2);
        hear(&meter, start, Step(2), &mut step);
        let later = meter.rate().unwrap();
        assert_eq!(later.entry, rate.entry);
        assert!(later.interval > rate.interval && later.interval < 2 * rate.interval, "{later:?}");
    }

    #[test]
    fn the_cap_of_a_step_is_the_selectors_within_what_there_is_room_for() {
        let follows = AdaptiveCap { min_ratio: 0.02, max_ratio: 0.25, load: 0.5 }.build().unwrap();
        let link =
            |entry| Some(LinkRate { entry: Duration::from_micros(entry), interval: Duration::from_micros(1_000) });
        let cap = |heads, link| cap_of_step(&*follows, 100, 20, heads, link);
        // Half of 1,000 us holds 50 entries of 10 us: 12 for each of 4 heads, 50 for one.
        assert_eq!((cap(4, link(10)), cap(1, link(10)), cap(4, None)), (12, 20, 2));
        let constant = CappedLru { fetch_ratio: 0.05 }.build().unwrap();
        assert_eq!(cap_of_step(&*constant, 100, 5, 4, link(10)), 5);
    }
}
