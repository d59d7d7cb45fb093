//! Arguments that commands share.

use crate::error::CliResult;
use clap::Args;
use oasis_core::config::Layer;
use std::path::PathBuf;

/// Options of every command.
#[derive(Debug, Clone, Default, Args)]
pub struct GlobalArgs {
    /// Configuration file [default: $OASIS_CONFIG, else ./oasis.toml where there is one]
    #[arg(long, value_name = "FILE", global = true, help_heading = "Global options")]
    pub config: Option<PathBuf>,
    /// Set one value, such as selector.fetch_ratio=0.1; may be repeated
    #[arg(long, value_name = "KEY=VALUE", global = true, help_heading = "Global options")]
    pub set: Vec<String>,
    /// Log more to standard error: -v informs, -vv debugs, -vvv traces
    #[arg(short, long, action = clap::ArgAction::Count, global = true, help_heading = "Global options")]
    pub verbose: u8,
}

/// Shorthands that name the model.
#[derive(Debug, Default, Args)]
pub struct ModelArgs {
    /// model.path: a folder, a .gguf file or the name of an embedded model
    #[arg(long, value_name = "PATH")]
    model: Option<String>,
    /// model.draft: a folder, the name of an embedded head, auto or none
    #[arg(long, value_name = "PATH")]
    draft: Option<String>,
}

impl ModelArgs {
    /// Whether neither was given.
    pub fn is_absent(&self) -> bool {
        self.model.is_none() && self.draft.is_none()
    }

    /// The settings they stand for.
    ///
    /// # Errors
    /// Never for the keys that are named here.
    pub fn layers(&self) -> CliResult<Vec<Layer>> {
        let named = [("--model", "model.path", &self.model), ("--draft", "model.draft", &self.draft)];
        let given = named.iter().filter_map(|(argument, key, value)| Some((argument, key, value.as_ref()?)));
        given.map(|(argument, key, value)| shorthand(argument, key, value)).collect()
    }
}

/// A shorthand argument as a layer: `--model PATH` sets `model.path`. `value` is taken as it is, even where it looks
/// like a number.
///
/// # Errors
/// Never for the keys that the program itself names.
fn shorthand(argument: &str, key: &str, value: &str) -> CliResult<Layer> {
    let literal = toml::Value::String(value.to_owned());
    Ok(Layer::assignment(&format!("{argument} {value}"), &format!("{key}={literal}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorthand_keeps_its_text() {
        for text in ["true", "12", "a b", "quo\"te\\path", "a=b"] {
            let layer = shorthand("--model", "model.path", text).unwrap();
            let whole = Layer::file("f", &format!("[model]\npath = {}", toml::Value::String(text.to_owned()))).unwrap();
            // Origins differ; the tables must not.
            assert_eq!(
                format!("{layer:?}").split_once("table").unwrap().1,
                format!("{whole:?}").split_once("table").unwrap().1
            );
        }
    }
}
