//! Sweeps: a grid of settings, a measurement at each point, one file a finished point, and a report of them all.

mod chart;
mod file;
mod point;
mod report;
mod state;
mod table;

pub use chart::Chart;
pub use file::{Plot, SweepFile};
pub use point::{Finished, Point};
pub use report::{pictures, render};
pub use state::State;
pub use table::{Row, Table};
