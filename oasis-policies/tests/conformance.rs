//! Every kind of this crate passes its role's suite, and a few pass sharper ones.

use oasis_core::registry;
use oasis_core::testkit;
use oasis_policies::predictors::{DraftQuery, Exact, LastQuery};
use oasis_policies::selectors::{CappedLru, FetchAll};
use oasis_policies::summarizers::Quest;

#[test]
fn every_registered_kind_passes_the_suite_of_its_role() {
    let mut checked = Vec::new();
    for plugin in registry::plugins().into_iter().filter(|p| p.crate_name == "oasis-policies") {
        testkit::conforms(plugin);
        checked.push(format!("{} {}", plugin.role, plugin.kind));
    }
    let expected = [
        "summarizer mean",
        "summarizer quest",
        "predictor draft-query",
        "predictor exact",
        "predictor last-query",
        "selector capped-lru",
        "selector fetch-all",
        "selector static",
    ];
    assert_eq!(checked, expected);
}

#[test]
fn the_catalogue_and_typetag_know_the_same_kinds() {
    testkit::catalogue_agrees_with_typetag();
}

#[test]
fn quest_bounds_the_score_of_every_key() {
    testkit::summarizer::bounds_every_key(&Quest {});
}

#[test]
fn selectors_at_every_ratio_equal_the_naive_oracle() {
    for fetch_ratio in [0.0, 0.05, 0.3, 0.5, 1.0] {
        let spec = CappedLru { fetch_ratio };
        testkit::selector::conforms(&spec);
        testkit::selector::equals_capped_lru(&spec);
    }
    testkit::selector::equals_capped_lru(&FetchAll {});
}

#[test]
fn predictors_conform_with_either_aggregate() {
    use oasis_core::policy::Aggregate::Max;
    testkit::predictor::conforms(&DraftQuery { aggregate: Max });
    testkit::predictor::conforms(&LastQuery { aggregate: Max });
    testkit::predictor::conforms(&Exact { aggregate: Max });
}
