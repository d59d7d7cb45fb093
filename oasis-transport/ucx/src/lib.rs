//! One-sided reads of another process's memory over UCX's UCP layer, which is opened at run time: neither the build nor
//! the program needs UCX or an RDMA adapter until an [`Engine`] is started.
//!
//! The owner of memory takes a [`Pool`] and gives its [`Descriptor`] to readers, over a connection of its own that says
//! who they are. A reader connects and reads into a [`Buffer`] of a pool of its own:
//!
//! ```no_run
//! # use oasis_ucx::{Access, Descriptor, Engine, Search, Segment, Settings, Wire};
//! # use std::time::Duration;
//! # async fn read(bytes: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
//! let settings = Settings { search: Search::default(), wire: Wire::Tcp, device: None };
//! let engine = Engine::start(&settings)?;
//! let landing = engine.pool(1 << 20, Access::Landing)?;
//! let peer = engine.connect(Descriptor::decode(bytes)?).await?;
//! let buffer = landing.take(8192).ok_or("the pool is lent out")?;
//! let segments = vec![Segment { local: 0, remote: 65536, len: 8192 }];
//! let buffer = engine.read(peer, segments, buffer, Duration::from_secs(1)).await?;
//! assert_eq!(buffer.bytes().len(), 8192);
//! # Ok(())
//! # }
//! ```
//!
//! All unsafe code is in here; what is public is safe to use, with one reservation that no reader can lift. UCX trusts
//! its peers: whoever has a descriptor can read the whole pool, and UCX's emulation over TCP serves any address it is
//! asked for. Descriptors belong on authenticated connections of a network that is trusted.
#![allow(unsafe_code)]

mod descriptor;
mod engine;
mod error;
mod library;
mod memory;
pub mod probe;
mod ranges;
mod settings;
mod sys;
mod wait;
mod worker;

pub use descriptor::Descriptor;
pub use engine::{Engine, Peer, Pool};
pub use error::{ReadError, Unavailable};
pub use library::{LIBRARY, Search, prepare_environment};
pub use memory::{Buffer, Word};
pub use settings::{Access, Segment, Settings, Wire};
