//! For tests of policies, transports and stores: conformance suites, an oracle, doubles and fault injection.
//!
//! Every role has a suite that checks what its trait promises; a plugin's test calls it in one line, or all of them at
//! once:
//!
//! ```no_run
//! for plugin in oasis_core::registry::plugins() {
//!     oasis_core::testkit::conforms(plugin);
//! }
//! ```
//!
//! A suite panics at the first broken obligation and names the seed of the random case that showed it.

pub mod doubles;
pub mod faulty;
pub mod predictor;
mod random;
pub mod selector;
pub mod store;
pub mod summarizer;
pub mod transport;

pub use random::{Random, for_all, fuzz_cases};

use crate::memory::{StoreSpec, TransportSpec};
use crate::policy::{PredictorSpec, SelectorSpec, SummarizerSpec};
use crate::registry::{self, PluginInfo, Role};
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::future::Future;

/// Runs the suite of the plugin's role on its default configuration.
///
/// # Panics
/// When the plugin breaks an obligation.
pub fn conforms(plugin: &PluginInfo) {
    match plugin.role {
        Role::Summarizer => summarizer::conforms(&*default_spec::<dyn SummarizerSpec>(plugin)),
        Role::Predictor => predictor::conforms(&*default_spec::<dyn PredictorSpec>(plugin)),
        Role::Selector => selector::conforms(&*default_spec::<dyn SelectorSpec>(plugin)),
        Role::Transport => transport::conforms(&*default_spec::<dyn TransportSpec>(plugin)),
        Role::Store => store::conforms(&*default_spec::<dyn StoreSpec>(plugin)),
    }
}

fn default_spec<S: ?Sized>(plugin: &PluginInfo) -> Box<S>
where
    Box<S>: DeserializeOwned,
{
    let mut table = (plugin.defaults)().expect("the default configuration serialises");
    table.insert("kind".to_owned(), plugin.kind.into());
    table.try_into().unwrap_or_else(|e| panic!("{} `{}`: {e}", plugin.role, plugin.kind))
}

/// Checks that typetag, which reads configurations, and the catalogue, which lists kinds, know the same kinds.
///
/// # Panics
/// When a kind is known to one of them only.
pub fn catalogue_agrees_with_typetag() {
    registry::check_catalogue().expect("the catalogue is sound");
    for role in Role::ALL {
        let catalogue: BTreeSet<String> =
            registry::plugins().iter().filter(|p| p.role == role).map(|p| p.kind.to_owned()).collect();
        let typetag = match role {
            Role::Summarizer => known_to_typetag::<dyn SummarizerSpec>(),
            Role::Predictor => known_to_typetag::<dyn PredictorSpec>(),
            Role::Selector => known_to_typetag::<dyn SelectorSpec>(),
            Role::Transport => known_to_typetag::<dyn TransportSpec>(),
            Role::Store => known_to_typetag::<dyn StoreSpec>(),
        };
        assert_eq!(typetag, catalogue, "kinds of {role}: typetag on the left, the catalogue on the right");
    }
}

/// Kinds in the error that typetag gives for an unknown one.
fn known_to_typetag<S: ?Sized>() -> BTreeSet<String>
where
    Box<S>: DeserializeOwned,
{
    let unknown = toml::Table::from_iter([("kind".to_owned(), "no kind has this name".into())]);
    let Err(error) = unknown.try_into::<Box<S>>() else { panic!("a kind has a name that none should have") };
    // unknown variant `x`, expected one of `a`, `b`
    let names: Vec<&str> = error.message().split('`').collect();
    names.into_iter().skip(1).step_by(2).skip(1).map(str::to_owned).collect()
}

/// Runs a future of a [`Transport`](crate::memory::Transport) or [`KvStore`](crate::memory::KvStore) to its end.
///
/// # Panics
/// When the operating system gives no event queue.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime for one thread").block_on(future)
}

#[cfg(test)]
mod tests;
