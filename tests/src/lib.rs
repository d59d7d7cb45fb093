//! Shared parts of the end-to-end tests: real models, references, executors.

pub mod models;
pub mod references;

// Plugins register themselves only where their crate is linked.
use oasis_policies as _;
use oasis_transport as _;
