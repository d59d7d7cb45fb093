//! Sweeps: a grid of settings, a measurement at each point, one file a finished point, and a report of them all.

mod chart;
mod check;
mod failures;
mod file;
mod inputs;
mod job;
mod measures;
mod needs;
mod plots;
mod point;
mod program;
mod report;
mod state;
mod table;
mod time;

pub use chart::Chart;
pub use check::Checks;
pub use failures::Failures;
pub use file::{Plot, SweepFile};
pub use inputs::Digests;
pub use job::Job;
pub use needs::{Needs, Work};
pub use table::{Row, Table};
