//! Conformance of transports.

use super::{block_on, for_all};
use crate::memory::{EntryCopy, EntryTarget, Transport, TransportSpec};

/// Checks the obligations of [`Transport`] between two host memories: every byte arrives, call after call, and a target
/// of another size than its source is refused. A transport that a device carries out by itself is none between two host
/// memories: it must say so, with a hint.
///
/// # Panics
/// When an obligation is broken.
pub fn conforms(spec: &dyn TransportSpec) {
    if spec.device_link().is_some() {
        let refusal = spec.build().err().unwrap_or_else(|| panic!("{spec:?}: opened without its device"));
        assert!(refusal.hint.is_some(), "{refusal}: says nothing of what to do");
        return;
    }
    let mut transport = spec.build().unwrap_or_else(|error| panic!("{spec:?} does not open: {error}"));
    for_all(60, |random| {
        let sizes: Vec<usize> = (0..random.below(9)).map(|_| random.pick(&[0, 1, 7, 64, 512, 8192])).collect();
        let sources: Vec<Vec<u8>> = sizes.iter().map(|&n| (0..n).map(|_| random.any()).collect()).collect();
        let mut targets: Vec<Vec<u8>> = sizes.iter().map(|&n| vec![0xaa; n]).collect();
        gather(&mut *transport, &sources, &mut targets).unwrap_or_else(|error| panic!("host to host: {error:#}"));
        assert!(targets == sources, "the bytes that arrived are not those that were sent");

        if let Some(wrong) = targets.first_mut() {
            wrong.push(0);
            assert!(gather(&mut *transport, &sources, &mut targets).is_err(), "a target that is too long is taken");
        }
    });
}

fn gather(transport: &mut dyn Transport, sources: &[Vec<u8>], targets: &mut [Vec<u8>]) -> anyhow::Result<()> {
    let mut copies: Vec<EntryCopy<'_>> = (sources.iter().zip(targets))
        .map(|(source, target)| EntryCopy { source, target: EntryTarget::Host(target) })
        .collect();
    block_on(transport.gather(&mut copies))
}
