//! Where configuration comes from: a file, the environment, the command line.

use crate::cli::GlobalArgs;
use crate::env;
use crate::error::{CliError, CliResult};
use clap::Args;
use oasis_core::config::{Layer, Resolved};
use std::path::{Path, PathBuf};

/// The file that is read where none is named.
pub const DEFAULT_FILE: &str = "oasis.toml";

/// The configuration file that counts, if any: the named one, else [`DEFAULT_FILE`] where there is one.
pub fn config_file(global: &GlobalArgs) -> Option<PathBuf> {
    global
        .config
        .clone()
        .or_else(env::config_file)
        .or_else(|| Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.exists()))
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

/// Merges defaults, file, environment, `--set` and then `arguments`, a command's own shorthands.
///
/// # Errors
/// When the file cannot be read, or one value is wrong.
pub fn resolve(global: &GlobalArgs, arguments: Vec<Layer>) -> CliResult<Resolved> {
    let mut layers = Vec::new();
    if let Some(path) = config_file(global) {
        layers.push(read(&path)?);
    }
    layers.extend(Layer::env(env::variables()));
    for assignment in &global.set {
        layers.push(Layer::assignment(&format!("--set {assignment}"), assignment)?);
    }
    layers.extend(arguments);
    Ok(Resolved::new(&layers)?)
}

fn read(path: &Path) -> CliResult<Layer> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| {
        CliError::input(
            format!("{name}: expected a readable configuration file, found: {error}"),
            "`oasis explain --toml > oasis.toml` writes one to start from",
        )
    })?;
    Ok(Layer::file(&name, &text)?)
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
