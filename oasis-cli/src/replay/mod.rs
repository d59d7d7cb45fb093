//! Selections of a real run, recorded once and replayed with other selectors, budgets and links.

mod link;
mod record;
mod recording;
mod replayed;

pub use link::LinkModel;
pub use record::record;
pub use recording::Recording;
pub use replayed::{Replayed, render, replay};

#[cfg(test)]
mod tests;
