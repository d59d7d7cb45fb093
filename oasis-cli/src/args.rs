//! Arguments that commands share.

use crate::error::CliResult;
use crate::text::grouped;
use clap::Args;
use oasis_core::config::{Bytes, Layer};
use std::path::PathBuf;

/// Most that an argument counts: what is computed with counts stays far from the largest `usize`.
const MOST: usize = 1_000_000_000;

/// Reads a count of at least `least`.
pub fn count(least: usize) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text| {
        let count = text.parse().ok().filter(|count| (least..=MOST).contains(count));
        count.ok_or_else(|| format!("expected a whole number from {least} to {}", grouped(MOST as u64)))
    }
}

/// Reads a share of a whole.
///
/// # Errors
/// When it is no number above 0 and up to 1.
pub fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}

/// Reads a size of at least one byte, written as in a configuration: a number, or a text with a unit.
///
/// # Errors
/// When it is none.
pub fn size(text: &str) -> Result<Bytes, String> {
    let number = text.parse().map(toml::Value::Integer);
    let value = number.unwrap_or_else(|_| toml::Value::String(text.to_owned()));
    let size = value.try_into().ok().filter(|Bytes(bytes)| *bytes > 0);
    size.ok_or_else(|| "expected a number of bytes above 0, such as 80GB".to_owned())
}

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

/// Shorthand that names the target model alone.
#[derive(Debug, Default, Args)]
pub struct TargetArgs {
    /// model.path: a folder, a .gguf file or the name of an embedded model
    #[arg(long, value_name = "PATH")]
    model: Option<String>,
}

impl TargetArgs {
    /// The settings it stands for, without a draft head.
    ///
    /// # Errors
    /// Never for the keys that are named here.
    pub fn layers(&self) -> CliResult<Vec<Layer>> {
        let path = self.model.iter().map(|path| shorthand("--model", "model.path", path));
        path.chain([Layer::assignment("no draft head", "model.draft=none").map_err(Into::into)]).collect()
    }
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
