//! Transports: how planned entries move between two memories.

use crate::policy::SpecError;
use async_trait::async_trait;

/// Where an entry goes.
pub enum EntryTarget<'a> {
    /// A slot in memory that the host addresses.
    Host(&'a mut [u8]),
    /// A slot in a device's own memory.
    Device {
        /// Device address.
        address: u64,
        /// Size in bytes.
        bytes: usize,
    },
}

/// One planned entry.
pub struct EntryCopy<'a> {
    /// The entry in host memory.
    pub source: &'a [u8],
    /// The slot it goes to, of the same size.
    pub target: EntryTarget<'a>,
}

/// Moves the planned entries of one layer.
///
/// Obligations: when `gather` returns `Ok`, every target holds its source's bytes. On an error any target may hold
/// anything; the caller must not use those slots. No write reaches a target after `gather` has returned or its future
/// was dropped.
#[async_trait]
pub trait Transport: Send {
    /// Moves all of `copies`.
    ///
    /// # Errors
    /// When a target is of a kind the transport does not reach, sizes differ, or the link fails.
    async fn gather(&mut self, copies: &mut [EntryCopy<'_>]) -> anyhow::Result<()>;
}

/// How a device with memory of its own reaches host memory by itself, without a [`Transport`] object on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceLink {
    /// The device's own kernel reads entries from mapped host memory.
    Gather {
        /// Thread blocks of the kernel; `None` lets the device choose.
        ctas: Option<u32>,
        /// Entries in flight in each of them; `None` lets the device choose.
        depth: Option<usize>,
    },
    /// The device's copy engine, one copy an entry, queued by the host.
    CopyEngine,
}

/// Configuration of a [`Transport`], found by its `kind`.
#[typetag::serde(tag = "kind")]
pub trait TransportSpec: std::fmt::Debug + Send + Sync {
    /// Opens the transport.
    ///
    /// # Errors
    /// Names the field that has an impossible value.
    fn build(&self) -> Result<Box<dyn Transport>, SpecError>;

    /// How a device is to reach host memory by itself, where this transport means that.
    fn device_link(&self) -> Option<DeviceLink> {
        None
    }
}
