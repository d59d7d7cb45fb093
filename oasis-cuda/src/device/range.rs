//! Named stretches of host time for profilers (NVTX).

/// A range that a profiler shows until it is dropped. Without a profiler it does nothing.
pub struct Range(#[allow(dead_code, reason = "it ends when it is dropped")] nvtx::RangeGuard);

impl Range {
    /// Begins a range.
    pub fn begin(name: impl std::fmt::Display) -> Self {
        Self(nvtx::range!("{name}"))
    }
}
