//! Named stretches of host time for profilers (NVTX).

use cudarc::nvtx;
use std::sync::OnceLock;

/// A range that a profiler shows until it is dropped.
pub struct Range(#[allow(dead_code)] Option<nvtx::Range>);

impl Range {
    /// Begins a range; nothing where NVIDIA's tools extension (`libnvToolsExt`) is not there.
    pub fn begin(name: impl FnOnce() -> String) -> Self {
        static PRESENT: OnceLock<bool> = OnceLock::new();
        // SAFETY: this only tries to load the library by its usual names. Without it every other call panics.
        let present = *PRESENT.get_or_init(|| unsafe { nvtx::sys::is_culib_present() });
        Self(present.then(|| nvtx::scoped_range(name())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_harmless_without_a_profiler() {
        let mut named = false;
        drop(Range::begin(|| {
            named = true;
            "range".to_owned()
        }));
        // The name is made only where somebody may read it.
        // SAFETY: as above.
        assert_eq!(named, unsafe { nvtx::sys::is_culib_present() });
    }
}
