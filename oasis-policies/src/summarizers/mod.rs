//! Summarizers: what a block of keys is represented by on the device.

mod linear;
mod mean;
mod quest;

pub use mean::Mean;
pub use quest::Quest;
