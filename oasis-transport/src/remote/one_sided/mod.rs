//! Blocks by one-sided reads over UCX: the decode node reads them out of the prefill node's staging pool, whose CPU has no
//! part in it where an RDMA adapter carries the reads.
//!
//! What the session says ([`Message::Pool`](super::Message::Pool), [`Message::Places`](super::Message::Places)): the pool's
//! descriptor once, and for each request where its blocks lie, with its *epoch*: a number that the pool holds at a known
//! place as long as the blocks are lent. The prefill node clears it before it gives the blocks away; the decode node reads
//! it after the blocks. If it is still there, so were they.

mod places;
mod reader;
mod staging;

pub use places::Places;
pub use reader::OneSidedReader;
pub use staging::{Lending, StagingPool};

use oasis_core::config::{NodeTransport, NodesConfig};
use oasis_ucx::{Engine, Search, Settings, Unavailable, Wire};

/// What UCX is started with; `None` where blocks cross by messages.
pub fn ucx_settings(config: &NodesConfig) -> Option<Settings> {
    let wire = match config.transport {
        NodeTransport::Tcp => return None,
        NodeTransport::Roce => Wire::Rdma,
        NodeTransport::UcxTcp => Wire::Tcp,
    };
    let named = |value: &String| Some(value.clone()).filter(|value| value != "auto");
    let search = Search { path: named(&config.ucx_library).map(Into::into) };
    Some(Settings { search, wire, device: named(&config.ucx_device) })
}

/// Starts UCX where `nodes.transport` asks for it.
///
/// # Errors
/// When UCX or the adapter that it needs is not there: nothing else is taken in its place.
pub fn open_ucx(config: &NodesConfig) -> Result<Option<Engine>, Unavailable> {
    let Some(settings) = ucx_settings(config) else { return Ok(None) };
    let engine = Engine::start(&settings)?;
    tracing::info!("blocks cross over UCX {}, {:?}", engine.version(), settings.wire);
    Ok(Some(engine))
}

#[cfg(test)]
mod tests;
