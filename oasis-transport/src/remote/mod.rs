//! Between nodes: messages, authenticated sessions, and a store whose blocks are read from the node that has them.
//!
//! A *prefill node* reads prompts and keeps their KV in its store, the staging pool. A *decode node* takes a request over
//! with its state, and reads blocks from the staging pool when it first needs them. Control messages and, so far, blocks
//! travel over TCP; [`BlockReader`] is the part of it that another transport would replace.

mod codec;
mod message;
mod peer;
mod secret;
mod session;
mod store;
mod tls;

pub use codec::WireError;
pub use message::{BlockRead, Fact, Message, NodeMetrics, PartResult, Service, WIRE_VERSION, split_hand_over};
pub use peer::{Arrived, PeerEvent, PeerOptions, PrefillPeer};
pub use secret::Secret;
pub use session::{Received, Session, SessionError, Terms, accept, connect};
pub use store::{BlockReader, MAX_READ_BYTES, RemoteStore, RequestTraffic};
pub use tls::{Tls, TlsError, TlsFiles};
