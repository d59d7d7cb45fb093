//! Pictures of recorded traces.

mod draw;
mod file;
mod step;
mod svg;

pub use draw::draw;
pub use file::Recording;
pub use step::DecodeStep;
