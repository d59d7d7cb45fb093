//! `pcie-uva`: the device's own kernel reads host memory.

use oasis_core::memory::{DeviceLink, Transport, TransportSpec};
use oasis_core::policy::SpecError;
use serde::{Deserialize, Serialize};

/// A kernel with few thread blocks copies the planned entries from pinned host memory, which the device maps (unified
/// virtual addressing): no host thread takes part. Small scattered entries so reach what a copy engine reaches with large
/// ones.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PcieUva {
    /// Thread blocks, at most 1,024; 0 lets the device choose.
    pub ctas: u32,
    /// Entries in flight in each of them, 2 to 16; 0 lets the device choose.
    pub depth: usize,
}

oasis_core::register! {
    kind: "pcie-uva", about: "A GPU kernel reads entries from pinned host memory", device_code: true,
    impl TransportSpec for PcieUva {
        fn build(&self) -> Result<Box<dyn Transport>, SpecError> {
            Err(super::needs_a_gpu("pcie-uva"))
        }

        fn device_link(&self) -> Option<DeviceLink> {
            let (ctas, depth) = (self.ctas, self.depth);
            Some(DeviceLink::Gather { ctas: (ctas > 0).then_some(ctas), depth: (depth > 0).then_some(depth) })
        }
    }
}
