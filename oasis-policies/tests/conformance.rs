//! Every kind of this crate passes its role's suite, and a few pass sharper ones.

use oasis_core::registry;
use oasis_core::testkit;
use oasis_policies::predictors::{DraftQuery, Exact, FreeKv, InfiniGen, LastQuery, StreamingLlm};
use oasis_policies::selectors::{AdaptiveCap, CappedLru, FetchAll, Hysteresis, Lfu};
use oasis_policies::summarizers::{ArkVale, Quest, QuestFp8, QuestInt4, ShadowKv, Volume};

#[test]
fn every_registered_kind_passes_the_suite_of_its_role() {
    let mut checked = Vec::new();
    for plugin in registry::plugins().into_iter().filter(|p| p.crate_name == "oasis-policies") {
        testkit::conforms(plugin);
        checked.push(format!("{} {}", plugin.role, plugin.kind));
    }
    let expected = [
        "summarizer arkvale",
        "summarizer mean",
        "summarizer quest",
        "summarizer quest-fp8",
        "summarizer quest-int4",
        "summarizer shadowkv",
        "predictor draft-query",
        "predictor exact",
        "predictor freekv",
        "predictor infinigen",
        "predictor last-query",
        "predictor random",
        "predictor streaming-llm",
        "selector adaptive-cap",
        "selector capped-lru",
        "selector fetch-all",
        "selector hysteresis",
        "selector lfu",
        "selector static",
    ];
    assert_eq!(checked, expected);
}

#[test]
fn the_catalogue_and_typetag_know_the_same_kinds() {
    testkit::catalogue_agrees_with_typetag();
}

#[test]
fn summaries_that_claim_it_bound_the_score_of_every_key() {
    testkit::summarizer::bounds_every_key(&Quest {});
    testkit::summarizer::bounds_every_key(&QuestFp8 {});
    testkit::summarizer::bounds_every_key(&QuestInt4 {});
    testkit::summarizer::bounds_every_key(&ArkVale { volume: Volume::Sphere });
}

#[test]
fn summarizers_conform_with_other_settings() {
    testkit::summarizer::conforms(&ArkVale { volume: Volume::Sphere });
    testkit::summarizer::conforms(&ShadowKv { outlier_similarity: 0.8 });
}

#[test]
fn selectors_at_every_ratio_equal_the_naive_oracle() {
    for fetch_ratio in [0.0, 0.05, 0.3, 0.5, 1.0] {
        let spec = CappedLru { fetch_ratio };
        testkit::selector::conforms(&spec);
        testkit::selector::equals_capped_lru(&spec);
        testkit::selector::equals_capped_lru(&Hysteresis { fetch_ratio, margin: 0.0 });
        testkit::selector::conforms(&Hysteresis { fetch_ratio, margin: 0.5 });
        testkit::selector::conforms(&Lfu { fetch_ratio });
        testkit::selector::conforms(&AdaptiveCap { min_ratio: fetch_ratio, max_ratio: 1.0, load: 0.5 });
        let fixed = AdaptiveCap { min_ratio: fetch_ratio, max_ratio: fetch_ratio, load: 0.5 };
        testkit::selector::equals_capped_lru(&fixed);
    }
    testkit::selector::equals_capped_lru(&FetchAll {});
}

#[test]
fn predictors_conform_with_other_settings() {
    use oasis_core::policy::Aggregate::Max;
    for (sinks, recent) in [(0, 0), (1, 1), (0, 3), (4, 0), (50, 50)] {
        testkit::predictor::conforms(&DraftQuery { aggregate: Max, sinks, recent });
        testkit::predictor::conforms(&LastQuery { aggregate: Max, sinks, recent });
        testkit::predictor::conforms(&Exact { aggregate: Max, sinks, recent });
        testkit::predictor::conforms(&FreeKv { aggregate: Max, sinks, recent, min_similarity: 0.5 });
        testkit::predictor::conforms(&InfiniGen { aggregate: Max, sinks, recent });
        testkit::predictor::conforms(&StreamingLlm { sinks });
    }
}
