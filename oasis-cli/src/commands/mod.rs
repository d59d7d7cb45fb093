//! One file a command: its arguments and what it does.

pub mod bench;
pub mod check;
pub mod completions;
pub mod demo;
pub mod doctor;
pub mod eval;
pub mod explain;
pub mod list;
pub mod model;
pub mod new_policy;
pub mod pull;
pub mod run;
pub mod serve_node;
pub mod sweep;
pub mod trace;
