//! `pcie-copy-engine`: one copy an entry by the device's copy engine.

use oasis_core::memory::{DeviceLink, Transport, TransportSpec};
use oasis_core::policy::SpecError;
use serde::{Deserialize, Serialize};

/// The host reads every plan back and queues one copy an entry: what `pcie-uva` is compared with. Plans cross the link
/// twice and each small copy costs the engine microseconds, so steps are queued kernel by kernel and the host waits in
/// every layer.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PcieCopyEngine {}

oasis_core::register! {
    kind: "pcie-copy-engine", about: "A GPU's copy engine, one copy an entry, for comparison", device_code: false,
    impl TransportSpec for PcieCopyEngine {
        fn build(&self) -> Result<Box<dyn Transport>, SpecError> {
            Err(super::needs_a_gpu("pcie-copy-engine"))
        }

        fn device_link(&self) -> Option<DeviceLink> {
            Some(DeviceLink::CopyEngine)
        }
    }
}
