//! The full KV of a prompt on the device: from its prefill, which copies it to the host, to its first decode step.

use crate::device::{Device, DeviceBuffer, DeviceError};
use crate::kernels::Address;

/// Most places that layers take in turn: enough that copies run beside what is computed.
const TURNS: usize = 4;

/// Which layers have a place of their own. Where there are fewer places than layers, layers behind those take the last few
/// places in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Places {
    layers: usize,
    kept: usize,
    turns: usize,
}

impl Places {
    /// `places` for so many layers.
    pub fn new(layers: usize, places: usize) -> Self {
        let turns = places.min(TURNS);
        Self { layers, kept: if places < layers { places - turns } else { layers }, turns }
    }

    /// Layers, from the first one on, that a prefill leaves there.
    pub fn kept(self) -> usize {
        self.kept
    }

    /// The layer whose place in a prefill is that of `layer` afterwards.
    pub fn before(self, layer: usize) -> Option<usize> {
        layer.checked_sub(self.turns).filter(|before| *before >= self.kept)
    }

    /// How many layers, from the first one on, may have been fetched when `layer` is about to be read, where the first
    /// `kept` need not be.
    pub fn fetched_by(self, layer: usize, kept: usize) -> usize {
        self.layers.min(layer.max(kept) + self.turns)
    }

    fn of(self, layer: usize) -> usize {
        layer.checked_sub(self.kept).map_or(layer, |behind| self.kept + behind % self.turns)
    }
}

/// Full KV of one request.
pub(super) struct Staging {
    /// `[places][blocks][kv_heads]` entries.
    entries: DeviceBuffer<u8>,
    /// u64 `[layers]`, where each of them lies.
    addresses: DeviceBuffer<u64>,
    /// Bytes of one place.
    stride: usize,
    pub places: Places,
}

impl Staging {
    /// `places` of `stride` bytes for so many layers.
    ///
    /// # Errors
    /// [`DeviceError`] without room.
    pub fn new(device: &Device, layers: usize, places: usize, stride: usize) -> Result<Self, DeviceError> {
        let entries: DeviceBuffer<u8> = device.zeros(places * stride)?;
        let places = Places::new(layers, places);
        let address = |layer| entries.address().offset(places.of(layer) * stride).0;
        let addresses: Vec<u64> = (0..layers).map(address).collect();
        Ok(Self { addresses: device.upload(&addresses)?, entries, stride, places })
    }

    /// Where a layer lies.
    pub fn layer(&self, layer: usize) -> Address {
        self.entries.address().offset(self.places.of(layer) * self.stride)
    }

    /// Where the address of a layer lies.
    pub fn address_of(&self, layer: usize) -> Address {
        self.addresses.address().offset(layer * size_of::<u64>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is in each place, written and read in the order of a prefill and a first step.
    struct Device(Vec<Option<usize>>);

    impl Device {
        fn write(&mut self, places: Places, layer: usize) {
            self.0[places.of(layer)] = Some(layer);
        }
    }

    #[test]
    fn every_layer_is_there_when_a_first_step_reads_it() {
        for (layers, count) in (1..40).flat_map(|layers| (2..42).map(move |count| (layers, count))) {
            let places = Places::new(layers, count);
            let mut device = Device(vec![None; count]);
            for layer in 0..layers {
                let taken = device.0[places.of(layer)];
                assert_eq!(places.before(layer), taken, "layer {layer} of {layers}, {count} places");
                device.write(places, layer);
            }
            assert!(count >= layers || places.kept() + TURNS.min(count) == count);
            for kept in [0, places.kept()] {
                let mut fetched = kept;
                for layer in 0..layers {
                    for next in fetched..places.fetched_by(layer, kept) {
                        // Nothing that is still to be read.
                        assert!(device.0[places.of(next)].is_none_or(|gone| gone < layer || gone >= next));
                        device.write(places, next);
                    }
                    fetched = fetched.max(places.fetched_by(layer, kept));
                    assert_eq!(device.0[places.of(layer)], Some(layer), "{layers} layers, {count} places, {kept} kept");
                }
            }
        }
    }
}
