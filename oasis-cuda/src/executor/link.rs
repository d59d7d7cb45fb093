//! How fast planned entries cross the link, for selectors of the host that follow it.

use crate::device::{Device, DeviceError, Event, Stream};
use oasis_core::ids::{LayerId, Step};
use oasis_core::pipeline::LinkMeter;
use oasis_core::policy::LinkRate;
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
    /// Entries that are under way; 0 once the time was read.
    entries: usize,
}

impl LinkTimer {
    pub fn new(device: &Device, layers: usize) -> Result<Self, DeviceError> {
        let transfer = || Ok(Transfer { start: device.event()?, end: device.event()?, entries: 0 });
        Ok(Self { meter: LinkMeter::default(), transfers: (0..layers).map(|_| transfer()).collect::<Result<_, _>>()? })
    }

    /// A layer is about to be selected: gives what was measured so far.
    pub fn selecting(&mut self, layer: LayerId, step: Step) -> Result<Option<LinkRate>, DeviceError> {
        self.meter.selecting(layer, step, Instant::now());
        let transfer = &mut self.transfers[layer.index()];
        if transfer.entries > 0 && transfer.end.is_done()? {
            let micros = transfer.start.micros_until(&transfer.end)?;
            self.meter.carried(transfer.entries, Duration::from_secs_f64(micros.max(0.0) / 1e6));
            transfer.entries = 0;
        }
        Ok(self.meter.rate())
    }

    /// The next transfer of a layer carries so many entries.
    pub fn planned(&mut self, layer: LayerId, entries: usize) {
        self.transfers[layer.index()].entries = entries;
    }

    /// A layer's transfer is about to be queued.
    pub fn begin(&self, layer: usize, stream: &Stream) -> Result<(), DeviceError> {
        stream.record(&self.transfers[layer].start)
    }

    /// It was queued.
    pub fn end(&self, layer: usize, stream: &Stream) -> Result<(), DeviceError> {
        stream.record(&self.transfers[layer].end)
    }
}
