//! Pictures of recorded traces.

mod draw;
mod file;
mod step;

pub use draw::draw;
pub use file::Recording;
pub use step::DecodeStep;
