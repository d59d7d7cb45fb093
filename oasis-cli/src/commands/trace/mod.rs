//! `oasis trace`: selections of a run, recorded and replayed, and pictures of what `oasis run --trace` recorded.

mod draw;
mod record;
mod replay;

use crate::args::GlobalArgs;
use crate::error::CliResult;
use crate::sweep::Needs;
use clap::{Args, Subcommand};
use std::io::Write;

/// Arguments of `trace`.
#[derive(Debug, Args)]
pub struct TraceArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Draw one decode step as SVG: the foreground and the stages beside it
    Draw(draw::DrawArgs),
    /// Decode along a text and keep what every step wanted, with scores
    Record(record::RecordArgs),
    /// Replay recorded selections with another selector, budget or link, without the model
    Replay(replay::ReplayArgs),
}

impl TraceArgs {
    /// What a replay reads; `None` for the others, which measure nothing.
    pub fn needs(&self) -> Option<Needs> {
        match &self.action {
            Action::Replay(args) => Some(args.needs()),
            Action::Draw(_) | Action::Record(_) => None,
        }
    }
}

/// Draws, records or replays.
///
/// # Errors
/// When a file or a setting is wrong, or a request fails.
pub fn run(args: &TraceArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    match &args.action {
        Action::Draw(args) => draw::run(args, out),
        Action::Record(args) => record::run(args, global, out),
        Action::Replay(args) => replay::run(args, global, out),
    }
}
