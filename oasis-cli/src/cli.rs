//! Arguments: what can be said on the command line, and nothing of what it does.

use crate::args::GlobalArgs;
use crate::commands::{
    bench, check, completions, doctor, eval, explain, list, model, new_policy, pull, run, serve_node, sweep, trace,
};
use clap::{Parser, Subcommand};

/// Lookahead sparse decoding with most of the KV cache outside the device
#[derive(Debug, Parser)]
#[command(name = "oasis", version, max_term_width = 100, after_long_help = environment_help())]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: GlobalArgs,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// What `oasis` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer a prompt and say what it cost
    Run(run::RunArgs),
    /// Be one of two nodes: one reads prompts, one answers
    ServeNode(serve_node::ServeNodeArgs),
    /// Measure what policies do to answers and predictions
    Eval(eval::EvalArgs),
    /// Measure speed beside its floor
    Bench(bench::BenchArgs),
    /// Measure over a grid of settings, resume where it ended, and draw the results
    Sweep(sweep::SweepArgs),
    /// Compute what measured values say of what was not measured
    Model(model::ModelCommandArgs),
    /// Record and replay selections; draw what `run --trace` recorded
    Trace(trace::TraceArgs),
    /// List the policies, transports and stores that are linked in
    List(list::ListArgs),
    /// Start a crate with a policy of your own
    NewPolicy(new_policy::NewPolicyArgs),
    /// Print every configuration value and where it came from
    Explain(explain::ExplainArgs),
    /// Check a configuration and build everything but the weights
    Check(check::CheckArgs),
    /// Look at this machine and say what is missing
    Doctor(doctor::DoctorArgs),
    /// Download a model from the Hugging Face hub
    Pull(pull::PullArgs),
    /// Print a completion script for a shell
    Completions(completions::CompletionsArgs),
}

fn environment_help() -> String {
    let mut help = String::from("Environment:\n");
    for (name, about) in crate::env::ALL {
        help.push_str(&format!("  {name:<22}  {about}\n"));
    }
    help
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }
}
