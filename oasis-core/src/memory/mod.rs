//! Memories: the store that holds the full KV of every request, the transport between two memories, and the device
//! memory of executors whose device is the host.

mod device;
mod store;
mod transport;

pub use device::{LayerCache, Resident, Summaries, Tail};
pub use store::{
    BlockWrite, EntryKey, FetchedEntries, HostBytes, HostEntry, KvStore, Reservation, StoreError, StoreMetrics,
    StoreSpec, StoreUsage,
};
pub use transport::{DeviceLink, EntryCopy, EntryTarget, Transport, TransportSpec};
