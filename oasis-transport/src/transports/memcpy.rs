//! `memcpy`: plain copies within host memory.

use anyhow::{Context, ensure};
use async_trait::async_trait;
use oasis_core::memory::{EntryCopy, EntryTarget, Transport, TransportSpec};
use oasis_core::policy::SpecError;
use serde::{Deserialize, Serialize};

/// Copies entries one after another on the transfer worker's thread: the transport of executors whose device is the
/// host. Nothing is copied unless the whole batch can be.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memcpy {}

oasis_core::register! {
    kind: "memcpy", about: "Plain copies within host memory", device_code: false,
    impl TransportSpec for Memcpy {
        fn build(&self) -> Result<Box<dyn Transport>, SpecError> {
            Ok(Box::new(MemcpyTransport))
        }
    }
}

struct MemcpyTransport;

#[async_trait]
impl Transport for MemcpyTransport {
    async fn gather(&mut self, copies: &mut [EntryCopy<'_>]) -> anyhow::Result<()> {
        for (i, copy) in copies.iter().enumerate() {
            reachable(copy).with_context(|| format!("memcpy: entry {i} of {}", copies.len()))?;
        }
        for copy in copies {
            if let EntryTarget::Host(target) = &mut copy.target {
                target.copy_from_slice(copy.source);
            }
        }
        Ok(())
    }
}

fn reachable(copy: &EntryCopy<'_>) -> anyhow::Result<()> {
    match &copy.target {
        EntryTarget::Host(target) => {
            let (source, target) = (copy.source.len(), target.len());
            ensure!(source == target, "expected a target of the source's {source} bytes, found {target} bytes");
            Ok(())
        }
        EntryTarget::Device { address, .. } => anyhow::bail!(
            "expected a target in host memory, found device address {address:#x}; a device needs a transport that \
             reaches it, see `oasis list`"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gather(copies: &mut [EntryCopy<'_>]) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        runtime.block_on(MemcpyTransport.gather(copies))
    }

    #[test]
    fn one_wrong_size_copies_nothing_and_is_named() {
        let (mut good, mut short) = ([0; 4], [0; 3]);
        let mut copies = [
            EntryCopy { source: &[1; 4], target: EntryTarget::Host(&mut good) },
            EntryCopy { source: &[1; 4], target: EntryTarget::Host(&mut short) },
        ];
        let error = format!("{:#}", gather(&mut copies).unwrap_err());
        assert_eq!(error, "memcpy: entry 1 of 2: expected a target of the source's 4 bytes, found 3 bytes");
        assert_eq!(good, [0; 4]);
    }

    #[test]
    fn a_device_target_is_refused() {
        let target = EntryTarget::Device { address: 0x1000, bytes: 4 };
        let error = format!("{:#}", gather(&mut [EntryCopy { source: &[1; 4], target }]).unwrap_err());
        assert!(error.contains("found device address 0x1000"), "{error}");
    }
}
