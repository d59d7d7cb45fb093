//! The catalogue of policies, transports and stores that are linked into the program.
//!
//! [`register!`](crate::register) registers a spec twice: with typetag, which finds it by `kind` when a configuration
//! is read, and here, where it can be listed. Plugins are static: a crate that nothing refers to is not linked, so a
//! program says `use my_plugin as _;`.

use crate::memory::{StoreSpec, TransportSpec};
use crate::policy::{PredictorSpec, SelectorSpec, SummarizerSpec};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt;

/// The five roles of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// [`Summarizer`](crate::policy::Summarizer)
    Summarizer,
    /// [`Predictor`](crate::policy::Predictor)
    Predictor,
    /// [`Selector`](crate::policy::Selector)
    Selector,
    /// [`Transport`](crate::memory::Transport)
    Transport,
    /// [`KvStore`](crate::memory::KvStore)
    Store,
}

impl Role {
    /// All roles, in pipeline order.
    pub const ALL: [Self; 5] = [Self::Summarizer, Self::Predictor, Self::Selector, Self::Transport, Self::Store];

    /// Name of the role's section in a configuration.
    pub fn section(self) -> &'static str {
        match self {
            Self::Summarizer => "summarizer",
            Self::Predictor => "predictor",
            Self::Selector => "selector",
            Self::Transport => "transport",
            Self::Store => "store",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.section())
    }
}

/// Connects a spec trait with its role; implemented for the five spec trait objects only.
pub trait SpecTrait {
    /// The role.
    const ROLE: Role;
}

macro_rules! spec_traits {
    ($($spec:ident => $role:ident),*) => {
        $(impl SpecTrait for dyn $spec {
            const ROLE: Role = Role::$role;
        })*
    };
}
spec_traits!(SummarizerSpec => Summarizer, PredictorSpec => Predictor, SelectorSpec => Selector,
    TransportSpec => Transport, StoreSpec => Store);

/// What is known of a registered kind without building it.
pub struct PluginInfo {
    /// Role it plays.
    pub role: Role,
    /// Name in configurations.
    pub kind: &'static str,
    /// One line for listings.
    pub about: &'static str,
    /// Crate that registered it.
    pub crate_name: &'static str,
    /// Version of that crate.
    pub version: &'static str,
    /// Whether a GPU runs it by itself, as it is by default: by device code, or because the kernels know it.
    pub device_code: bool,
    /// Its fields with their defaults, as a table without `kind`.
    pub defaults: fn() -> Result<toml::Table, toml::ser::Error>,
}

inventory::collect!(PluginInfo);

/// Registers a spec under a kind, in typetag and in the catalogue.
///
/// The crate that calls it depends on `typetag` and `serde`; the spec implements `Default` and `Serialize`.
///
/// ```
/// use oasis_core::policy::{SelectBatch, Selector, SelectorSpec, SpecError};
/// use oasis_core::working_set::TransferPlan;
/// use serde::{Deserialize, Serialize};
///
/// /// Admits nothing.
/// #[derive(Debug, Default, Serialize, Deserialize)]
/// #[serde(deny_unknown_fields, default)]
/// struct Frozen {}
///
/// oasis_core::register! {
///     kind: "frozen", about: "Admits nothing", device_code: false,
///     impl SelectorSpec for Frozen {
///         fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
///             Ok(Box::new(FrozenSelector))
///         }
///     }
/// }
///
/// struct FrozenSelector;
///
/// impl Selector for FrozenSelector {
///     fn cap(&self, _budget: usize) -> usize {
///         0
///     }
///     fn plan(&mut self, _batch: &SelectBatch<'_>, _plan: &mut TransferPlan) {}
/// }
///
/// assert!(oasis_core::registry::plugins().iter().any(|p| p.kind == "frozen"));
/// ```
#[macro_export]
macro_rules! register {
    (
        kind: $kind:literal, about: $about:literal, device_code: $device:literal,
        impl $role:ident for $spec:ident { $($body:tt)* }
    ) => {
        #[typetag::serde(name = $kind)]
        impl $role for $spec { $($body)* }

        $crate::inventory::submit! {
            $crate::registry::PluginInfo {
                role: <dyn $role as $crate::registry::SpecTrait>::ROLE,
                kind: $kind,
                about: $about,
                crate_name: env!("CARGO_PKG_NAME"),
                version: env!("CARGO_PKG_VERSION"),
                device_code: $device,
                defaults: $crate::registry::defaults_of::<$spec>,
            }
        }
    };
}

/// Fields of a default spec.
///
/// # Errors
/// When the spec does not serialise to a table.
pub fn defaults_of<S: Default + serde::Serialize>() -> Result<toml::Table, toml::ser::Error> {
    toml::Table::try_from(S::default())
}

/// All linked plugins, by role and kind.
pub fn plugins() -> Vec<&'static PluginInfo> {
    let mut plugins: Vec<_> = inventory::iter::<PluginInfo>().collect();
    plugins.sort_by_key(|p| (p.role, p.kind, p.crate_name));
    plugins
}

/// A kind that no linked crate registers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {role} is called `{kind}`; known: {}{}", known.join(", "),
    nearest.map(|n| format!("; did you mean `{n}`?")).unwrap_or_default())]
pub struct UnknownKind {
    /// Role.
    pub role: Role,
    /// The name that was asked for.
    pub kind: String,
    /// Registered names.
    pub known: Vec<&'static str>,
    /// The registered name most like it, when one is close.
    pub nearest: Option<&'static str>,
}

/// Finds a registered kind.
///
/// # Errors
/// [`UnknownKind`] with the nearest name.
pub fn find(role: Role, kind: &str) -> Result<&'static PluginInfo, UnknownKind> {
    let of_role: Vec<_> = plugins().into_iter().filter(|p| p.role == role).collect();
    of_role.iter().find(|p| p.kind == kind).copied().ok_or_else(|| {
        let known: Vec<_> = of_role.iter().map(|p| p.kind).collect();
        UnknownKind { role, kind: kind.to_owned(), nearest: nearest(kind, known.iter().copied()), known }
    })
}

/// The candidate most like `name`, when one is close enough to be a misspelling.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    (candidates.into_iter().map(|c| (strsim::jaro_winkler(name, c), c)))
        .filter(|(likeness, _)| *likeness > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, c)| c)
}

/// A fault of the catalogue itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CatalogueError {
    /// Two crates register one kind; typetag would silently take either.
    #[error("{role} `{kind}` is registered twice: by {first} and by {second}; rename one of them")]
    Duplicate {
        /// Role.
        role: Role,
        /// Kind.
        kind: &'static str,
        /// First crate and version.
        first: String,
        /// Second crate and version.
        second: String,
    },
    /// A kind whose default configuration cannot be read back.
    #[error("{role} `{kind}` of {crate_name}: its default configuration cannot be read back: {problem}")]
    Defaults {
        /// Role.
        role: Role,
        /// Kind.
        kind: &'static str,
        /// Crate that registered it.
        crate_name: &'static str,
        /// What went wrong.
        problem: String,
    },
}

/// Checks the linked catalogue: no duplicate kinds, every default configuration readable under its own kind.
///
/// # Errors
/// The first fault.
pub fn check_catalogue() -> Result<(), CatalogueError> {
    check_plugins(&plugins())
}

fn check_plugins(plugins: &[&PluginInfo]) -> Result<(), CatalogueError> {
    let mut seen = BTreeMap::new();
    for plugin in plugins {
        let by = format!("{} {}", plugin.crate_name, plugin.version);
        if let Some(first) = seen.insert((plugin.role, plugin.kind), by.clone()) {
            return Err(CatalogueError::Duplicate { role: plugin.role, kind: plugin.kind, first, second: by });
        }
    }
    for plugin in plugins {
        read_defaults(plugin).map_err(|problem| CatalogueError::Defaults {
            role: plugin.role,
            kind: plugin.kind,
            crate_name: plugin.crate_name,
            problem,
        })?;
    }
    Ok(())
}

fn read_defaults(plugin: &PluginInfo) -> Result<(), String> {
    let mut table = (plugin.defaults)().map_err(|e| e.to_string())?;
    table.insert("kind".to_owned(), plugin.kind.into());
    match plugin.role {
        Role::Summarizer => read::<Box<dyn SummarizerSpec>>(table),
        Role::Predictor => read::<Box<dyn PredictorSpec>>(table),
        Role::Selector => read::<Box<dyn SelectorSpec>>(table),
        Role::Transport => read::<Box<dyn TransportSpec>>(table),
        Role::Store => read::<Box<dyn StoreSpec>>(table),
    }
}

fn read<T: DeserializeOwned>(table: toml::Table) -> Result<(), String> {
    table.try_into::<T>().map(drop).map_err(|e| e.message().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(kind: &'static str, crate_name: &'static str) -> PluginInfo {
        let defaults = || Ok(toml::Table::new());
        PluginInfo { role: Role::Selector, kind, about: "", crate_name, version: "1.0.0", device_code: false, defaults }
    }

    #[test]
    fn duplicate_kinds_are_named_with_both_crates() {
        let (a, b) = (plugin("lru", "alpha"), plugin("lru", "beta"));
        let error = check_plugins(&[&a, &b]).unwrap_err().to_string();
        assert_eq!(error, "selector `lru` is registered twice: by alpha 1.0.0 and by beta 1.0.0; rename one of them");
    }

    #[test]
    fn a_kind_that_typetag_does_not_know_is_a_fault() {
        let ghost = plugin("ghost", "alpha");
        assert!(matches!(check_plugins(&[&ghost]), Err(CatalogueError::Defaults { kind: "ghost", .. })));
    }

    #[test]
    fn the_nearest_name_is_suggested_only_when_close() {
        let known = ["capped-lru", "fetch-all", "static"];
        assert_eq!(nearest("caped-lru", known), Some("capped-lru"));
        assert_eq!(nearest("statik", known), Some("static"));
        assert_eq!(nearest("x", known), None);
    }
}
