//! Layers of configuration, merged with the origin of each value: defaults, file, environment, command line.

use crate::config::{Config, ConfigError, DeviceConfig, EngineConfig, KvConfig, ModelConfig, NodesConfig};
use crate::registry::{self, Role};
use crate::sampling::SamplingParams;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt;
use toml::{Table, Value};

/// Prefix of environment variables: `OASIS_SELECTOR__FETCH_RATIO` sets `selector.fetch_ratio`.
pub const ENV_PREFIX: &str = "OASIS_";

/// Kinds that are taken where no layer names one.
const DEFAULT_KINDS: [(Role, &str); 5] = [
    (Role::Summarizer, "quest"),
    (Role::Predictor, "draft-query"),
    (Role::Selector, "capped-lru"),
    (Role::Transport, "memcpy"),
    (Role::Store, "dram"),
];

/// Transport where no layer names one and the device is a GPU.
const GPU_TRANSPORT: &str = "pcie-uva";

/// The kind of a role where no layer names one.
fn default_kind(role: Role, layers: &[Layer]) -> &'static str {
    let device_kind = |layer: &Layer| layer.table.get("device")?.get("kind").cloned();
    match layers.iter().rev().find_map(device_kind) {
        Some(Value::String(kind)) if role == Role::Transport && kind == "cuda" => GPU_TRANSPORT,
        _ => DEFAULT_KINDS.iter().find(|(r, _)| *r == role).expect("every role has a default").1,
    }
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Built in.
    Default,
    /// A configuration file.
    File(String),
    /// An environment variable.
    Env(String),
    /// A command-line argument.
    Argument(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => f.write_str(path),
            Self::Env(name) => write!(f, "environment {name}"),
            Self::Argument(text) => write!(f, "argument {text}"),
        }
    }
}

/// Values that one source sets; later layers win.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    origin: Origin,
    table: Table,
}

impl Layer {
    /// A TOML file's text.
    ///
    /// # Errors
    /// When the text is no TOML; the message has line and column.
    pub fn file(path: &str, text: &str) -> Result<Self, ConfigError> {
        let table = text.parse::<Table>().map_err(|error| {
            ConfigError::new(path, "TOML", error.to_string().trim_end())
                .hint("`oasis explain` prints a complete configuration to start from")
        })?;
        Ok(Self { origin: Origin::File(path.to_owned()), table })
    }

    /// One `key.path=value` argument; `argument` is how it is shown in messages.
    ///
    /// # Errors
    /// When there is no `=`, no key or an empty part of one.
    pub fn assignment(argument: &str, assignment: &str) -> Result<Self, ConfigError> {
        let named = |key: &str| key.trim().split('.').all(|part| !part.is_empty());
        let Some((key, value)) = assignment.split_once('=').filter(|(key, _)| named(key)) else {
            return Err(ConfigError::new(
                argument,
                "key=value, such as selector.fetch_ratio=0.05",
                format!("`{assignment}`"),
            )
            .hint("`oasis explain` prints every key"));
        };
        let path: Vec<&str> = key.trim().split('.').collect();
        Ok(Self { origin: Origin::Argument(argument.to_owned()), table: nest(&path, scalar(value.trim())) })
    }

    /// Variables that begin with [`ENV_PREFIX`] and name a section: `__` stands for the dot.
    pub fn env(variables: impl IntoIterator<Item = (String, String)>) -> Vec<Self> {
        let mut layers: Vec<Self> = (variables.into_iter())
            .filter_map(|(name, value)| {
                let path = name.strip_prefix(ENV_PREFIX)?.to_lowercase();
                // One without a section is some other setting of ours, such as OASIS_LOG.
                path.find("__").is_some_and(|section| section > 0).then(|| Self {
                    table: nest(&path.split("__").collect::<Vec<_>>(), scalar(&value)),
                    origin: Origin::Env(name),
                })
            })
            .collect();
        layers.sort_by_key(|layer| layer.origin.to_string());
        layers
    }
}

/// A TOML literal where it is one, else a string.
fn scalar(text: &str) -> Value {
    (format!("v = {text}").parse::<Table>().ok())
        .and_then(|mut table| if table.len() == 1 { table.remove("v") } else { None })
        .unwrap_or_else(|| Value::String(text.to_owned()))
}

/// The table in which the dotted `path` has `value`.
fn nest(path: &[&str], value: Value) -> Table {
    let (first, rest) = path.split_first().expect("a path has at least one key");
    let value = if rest.is_empty() { value } else { Value::Table(nest(rest, value)) };
    Table::from_iter([((*first).to_owned(), value)])
}

/// A configuration with the origin of each value.
#[derive(Debug)]
pub struct Resolved {
    /// The configuration.
    pub config: Config,
    /// Every key in order, with its value and origin.
    pub values: Vec<(String, Value, Origin)>,
}

impl Resolved {
    /// Merges `layers` over the defaults, first to last, and reads the result.
    ///
    /// A layer that changes the `kind` of a role also drops the fields that layers before it set for another kind.
    ///
    /// # Errors
    /// One clear error for the first unknown section, key or kind and the first impossible value.
    pub fn new(layers: &[Layer]) -> Result<Self, ConfigError> {
        let mut sections = Sections::default();
        let model = sections.plain("model", layers, &ModelConfig::default())?;
        let kv = sections.plain("kv", layers, &KvConfig::default())?;
        let config = Config {
            model,
            kv,
            summarizer: sections.role(Role::Summarizer, layers)?,
            predictor: sections.role(Role::Predictor, layers)?,
            selector: sections.role(Role::Selector, layers)?,
            transport: sections.role(Role::Transport, layers)?,
            store: sections.role(Role::Store, layers)?,
            device: sections.plain("device", layers, &DeviceConfig::default())?,
            engine: sections.plain("engine", layers, &EngineConfig::default())?,
            nodes: sections.plain("nodes", layers, &NodesConfig::default())?,
            sampling: sections.plain("sampling", layers, &SamplingParams::default())?,
        };
        sections.check_names(layers)?;
        let resolved = Self { config, values: sections.values };
        resolved.config.validate().map_err(|error| resolved.locate(error))?;
        Ok(resolved)
    }

    /// Adds to an error where its key's value came from.
    #[must_use]
    pub fn locate(&self, error: ConfigError) -> ConfigError {
        let origin = self.values.iter().find(|(key, ..)| *key == error.key).map(|(.., origin)| origin);
        error.from_origin(origin)
    }

    /// The configuration as a TOML document.
    pub fn to_toml(&self) -> String {
        let mut document = Table::new();
        for (key, value, _) in &self.values {
            let (section, field) = key.split_once('.').unwrap_or((key, ""));
            let section = document.entry(section).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(section) = section {
                section.insert(field.to_owned(), value.clone());
            }
        }
        document.to_string()
    }
}

/// Sections merged so far.
#[derive(Default)]
struct Sections {
    names: Vec<&'static str>,
    values: Vec<(String, Value, Origin)>,
}

impl Sections {
    fn plain<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &'static str,
        layers: &[Layer],
        defaults: &T,
    ) -> Result<T, ConfigError> {
        let defaults = Table::try_from(defaults).expect("configuration structs serialise to tables");
        let merged = merge(name, layers.iter(), &defaults)?;
        self.finish(name, &defaults, merged)
    }

    fn role<T: DeserializeOwned>(&mut self, role: Role, layers: &[Layer]) -> Result<T, ConfigError> {
        let name = role.section();
        let kind_of = |layer: &Layer| layer.table.get(name).and_then(|section| section.get("kind")).cloned();
        let chosen = layers.iter().enumerate().rev().find_map(|(i, layer)| Some((i, kind_of(layer)?)));
        let (kind, origin) = match &chosen {
            None => (default_kind(role, layers).to_owned(), Origin::Default),
            Some((i, Value::String(kind))) => (kind.clone(), layers[*i].origin.clone()),
            Some((i, other)) => {
                return Err(ConfigError::new(format!("{name}.kind"), "the name of a kind", describe(other))
                    .from_origin(Some(&layers[*i].origin)));
            }
        };
        let plugin = registry::find(role, &kind).map_err(|unknown| {
            ConfigError::new(
                format!("{name}.kind"),
                format!("one of {}", unknown.known.join(", ")),
                format!("`{kind}`"),
            )
            .from_origin(Some(&origin))
            .hint(match unknown.nearest {
                Some(nearest) => format!("did you mean `{nearest}`?"),
                None => "a plugin is known only to a program that links its crate (`use my_plugin as _;`)".to_owned(),
            })
        })?;
        let mut defaults = Table::from_iter([("kind".to_owned(), Value::String(kind.clone()))]);
        defaults.extend((plugin.defaults)().map_err(|e| ConfigError::new(name, "serialisable defaults", e))?);

        // Fields count only where their layer already meant this kind.
        let mut current = Some(default_kind(role, layers).to_owned());
        let meant: Vec<&Layer> = (layers.iter())
            .filter(|layer| {
                if let Some(Value::String(kind)) = kind_of(layer) {
                    current = Some(kind);
                }
                current.as_ref() == Some(&kind)
            })
            .collect();
        let merged = merge(name, meant.into_iter(), &defaults)?;
        self.finish(name, &defaults, merged)
    }

    fn finish<T: DeserializeOwned>(
        &mut self,
        name: &'static str,
        defaults: &Table,
        merged: Merged,
    ) -> Result<T, ConfigError> {
        self.names.push(name);
        let table: Table = merged.iter().map(|(key, (value, _))| (key.clone(), value.clone())).collect();
        let read = table.try_into::<T>().map_err(|error| blame::<T>(name, defaults, &merged, error.message()))?;
        let mut values: Vec<_> =
            (merged.into_iter()).map(|(key, (value, origin))| (format!("{name}.{key}"), value, origin)).collect();
        // `kind` first, as people write it.
        values.sort_by_key(|(key, ..)| !key.ends_with(".kind"));
        self.values.extend(values);
        Ok(read)
    }

    fn check_names(&self, layers: &[Layer]) -> Result<(), ConfigError> {
        for layer in layers {
            for name in layer.table.keys() {
                if !self.names.contains(&name.as_str()) {
                    let error = ConfigError::new(
                        name,
                        format!("one of the sections {}", self.names.join(", ")),
                        format!("`{name}`"),
                    );
                    return Err(with_nearest(error, name, self.names.iter().copied()).from_origin(Some(&layer.origin)));
                }
            }
        }
        Ok(())
    }
}

/// Values of one section with their origins.
type Merged = BTreeMap<String, (Value, Origin)>;

fn merge<'a>(name: &str, layers: impl Iterator<Item = &'a Layer>, defaults: &Table) -> Result<Merged, ConfigError> {
    let mut merged: Merged =
        defaults.iter().map(|(key, value)| (key.clone(), (value.clone(), Origin::Default))).collect();
    for layer in layers {
        let Some(section) = layer.table.get(name) else { continue };
        let Value::Table(section) = section else {
            return Err(ConfigError::new(name, format!("a section [{name}]"), describe(section))
                .from_origin(Some(&layer.origin)));
        };
        for (key, value) in section {
            if !merged.contains_key(key) {
                let known: Vec<&str> = merged.keys().map(String::as_str).collect();
                let error = ConfigError::new(
                    format!("{name}.{key}"),
                    format!("one of the keys {}", known.join(", ")),
                    format!("`{key}`"),
                );
                return Err(with_nearest(error, key, known).from_origin(Some(&layer.origin)));
            }
            let value = match (&merged[key].0, value) {
                // A whole number is fine where a fraction is expected.
                (Value::Float(_), Value::Integer(i)) => Value::Float(*i as f64),
                (Value::Table(below), Value::Table(above)) => Value::Table(merge_part(below, above)),
                (_, value) => value.clone(),
            };
            merged.insert(key.clone(), (value, layer.origin.clone()));
        }
    }
    Ok(merged)
}

/// A part within a section: fields of the same kind are kept, those of another kind dropped.
fn merge_part(below: &Table, above: &Table) -> Table {
    let is_other = above.get("kind").is_some_and(|kind| below.get("kind") != Some(kind));
    let mut part = if is_other { Table::new() } else { below.clone() };
    part.extend(above.clone());
    part
}

/// Finds the value that cannot be read: the defaults can, so each value is tried alone among them.
fn blame<T: DeserializeOwned>(name: &str, defaults: &Table, merged: &Merged, message: &str) -> ConfigError {
    for (key, (value, origin)) in merged {
        let mut table = defaults.clone();
        table.insert(key.clone(), value.clone());
        if let Err(error) = table.try_into::<T>() {
            let message = error.message();
            let expected = message.split_once("expected ").map_or(message, |(_, rest)| rest);
            let expected = expected.split(", found").next().unwrap_or(expected).trim_end();
            let default = defaults.get(key).map_or_else(|| "none".to_owned(), describe);
            return ConfigError::new(format!("{name}.{key}"), in_words(expected), describe(value))
                .from_origin(Some(origin))
                .hint(format!("the default is {default}"));
        }
    }
    ConfigError::new(name, "a section whose values fit together", message)
}

/// What a reader of configuration expects, where it says so with a type of the program.
fn in_words(expected: &str) -> &str {
    match expected {
        "usize" | "u64" => "a whole number of at least 0",
        "u32" => "a whole number from 0 to 4,294,967,295",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a string" => "a text",
        other => other,
    }
}

fn describe(value: &Value) -> String {
    match value {
        Value::String(text) => format!("\"{text}\""),
        Value::Integer(i) => i.to_string(),
        Value::Float(x) => x.to_string(),
        Value::Boolean(b) => b.to_string(),
        Value::Table(_) => "a table".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Datetime(date) => date.to_string(),
    }
}

fn with_nearest<'a>(error: ConfigError, name: &str, known: impl IntoIterator<Item = &'a str>) -> ConfigError {
    match registry::nearest(name, known) {
        Some(nearest) => error.hint(format!("did you mean `{nearest}`?")),
        None => error,
    }
}
