//! Where configuration comes from: a file, the environment, the command line.

use crate::args::GlobalArgs;
use crate::env;
use crate::error::{CliError, CliResult};
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

/// Merges defaults, file, environment, `--set` and then `arguments`, a command's own shorthands.
///
/// # Errors
/// When the file cannot be read, or one value is wrong.
pub fn resolve(global: &GlobalArgs, arguments: Vec<Layer>) -> CliResult<Resolved> {
    resolve_over(Vec::new(), global, arguments)
}

/// As [`resolve`], over `base` in place of the defaults.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_over(base: Vec<Layer>, global: &GlobalArgs, arguments: Vec<Layer>) -> CliResult<Resolved> {
    let mut layers = base;
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
