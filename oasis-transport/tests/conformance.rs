//! Every kind of this crate passes its role's suite.

use oasis_core::config::Bytes;
use oasis_core::memory::StoreSpec;
use oasis_core::registry;
use oasis_core::testkit;
use oasis_transport::stores::Dram;

#[test]
fn every_registered_kind_passes_the_suite_of_its_role() {
    let mut checked = Vec::new();
    for plugin in registry::plugins().into_iter().filter(|p| p.crate_name == "oasis-transport") {
        testkit::conforms(plugin);
        checked.push(format!("{} {}", plugin.role, plugin.kind));
    }
    assert_eq!(checked, ["transport memcpy", "store dram"]);
}

#[test]
fn the_catalogue_and_typetag_know_the_same_kinds() {
    testkit::catalogue_agrees_with_typetag();
}

#[test]
fn a_dram_store_conforms_when_it_is_small_and_of_an_odd_size() {
    for capacity in [64 << 10, (64 << 10) + 12345] {
        testkit::store::conforms(&Dram { capacity: Bytes(capacity) });
    }
}

#[test]
fn a_dram_store_without_room_is_refused() {
    let error = Dram { capacity: Bytes(0) }.build().err().expect("no store has no room");
    assert_eq!(error.field, "capacity");
    assert!(error.to_string().contains("8GiB is the default"), "{error}");
}
