//! The commands that a sweep can run.

use crate::cli::Cli;
use crate::error::CliError;
use clap::CommandFactory;

/// All of `eval` and `bench` but `eval tasks`, which measures nothing, and `trace replay`.
pub fn measures() -> Vec<String> {
    let cli = Cli::command();
    let of = |name: &str| -> Vec<String> {
        let commands = cli.find_subcommand(name).into_iter().flat_map(clap::Command::get_subcommands);
        commands.map(|command| format!("{name} {}", command.get_name())).filter(|name| name != "eval tasks").collect()
    };
    [of("eval"), of("bench"), vec!["trace replay".to_owned()]].concat()
}

/// That `command` is none of them.
pub fn refused(command: &str) -> CliError {
    CliError::input(
        format!("measure: expected a command of `oasis eval` or `oasis bench`, or `trace replay`, found {command}"),
        format!("one of {}; arguments stand in `arguments`", measures().join(", ")),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measure_can_print_json() {
        let measures = measures();
        assert!(["eval recall", "bench cpu", "trace replay"].iter().all(|name| measures.contains(&(*name).to_owned())));
        for name in &measures {
            let command = name.split(' ').fold(Cli::command(), |command, word| {
                command.find_subcommand(word).unwrap_or_else(|| panic!("{name}")).clone()
            });
            assert!(command.get_arguments().any(|argument| argument.get_long() == Some("json")), "{name}");
        }
    }
}
