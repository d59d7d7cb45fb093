//! Transports: how planned entries move between two memories.

mod memcpy;
mod pcie_copy_engine;
mod pcie_uva;

pub use memcpy::Memcpy;
pub use pcie_copy_engine::PcieCopyEngine;
pub use pcie_uva::PcieUva;

use oasis_core::policy::SpecError;

/// Why a transport of GPUs cannot be opened for a device that is the host.
fn needs_a_gpu(kind: &str) -> SpecError {
    SpecError::new("kind", "a transport between host memories, such as memcpy", kind)
        .hint("device.kind = \"cuda\" runs on a GPU, where this transport belongs")
}
