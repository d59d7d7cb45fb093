//! Between nodes: messages, authenticated sessions, and a store whose blocks are read from the node that has them.
//!
//! A *prefill node* reads prompts and keeps their KV in its store, the staging pool. A *decode node* takes a request over
//! with its state, and reads blocks from the staging pool when it first needs them. Control messages
//! travel over TCP; how blocks get to the decode node is a [`BlockReader`]: by messages of the session, or by one-sided reads
//! of the staging pool over UCX ([`OneSidedReader`]).

mod codec;
mod error;
mod message;
mod one_sided;
mod peer;
mod reader;
mod secret;
mod session;
mod store;
mod tls;

pub use codec::WireError;
pub use error::SessionError;
pub use message::{BlockRead, Fact, Message, NodeMetrics, PartResult, Service, WIRE_VERSION, split_hand_over};
pub use one_sided::{Lending, OneSidedReader, Places, StagingPool, open_ucx, ucx_settings};
pub use peer::{Arrived, PeerEvent, PeerOptions, PrefillPeer};
pub use reader::{BlockReader, Lent, MAX_READ_BYTES, ReadResult};
pub use secret::Secret;
pub use session::{Received, Session, Terms, accept, connect};
pub use store::{RemoteStore, RequestTraffic};
pub use tls::{Tls, TlsError, TlsFiles};
