//! Every kind of this crate passes its role's suite.

use oasis_core::config::Bytes;
use oasis_core::memory::StoreSpec;
use oasis_core::registry::{self, Role};
use oasis_core::testkit;
use oasis_transport::stores::{Dram, Ssd, SsdIo, Tiered};

/// Runs `test` on an `ssd` store in a folder of its own.
fn with_ssd(capacity: u64, test: impl Fn(Ssd)) {
    let folder = tempfile::tempdir().expect("a folder for files");
    test(Ssd { directory: folder.path().to_owned(), capacity: Bytes(capacity), ..Ssd::default() });
}

#[test]
fn every_registered_kind_passes_the_suite_of_its_role() {
    let mut checked = Vec::new();
    for plugin in registry::plugins().into_iter().filter(|p| p.crate_name == "oasis-transport") {
        match (plugin.role, plugin.kind) {
            // The default would claim its 64 GiB in this folder.
            (Role::Store, "ssd") => with_ssd(64 << 20, |ssd| testkit::store::conforms(&ssd)),
            (Role::Store, "tiered") => with_ssd(64 << 20, |ssd| {
                testkit::store::conforms(&Tiered { backing: Box::new(ssd), ..Tiered::default() });
            }),
            _ => testkit::conforms(plugin),
        }
        checked.push(format!("{} {}", plugin.role, plugin.kind));
    }
    assert_eq!(
        checked,
        [
            "transport memcpy",
            "transport pcie-copy-engine",
            "transport pcie-uva",
            "store dram",
            "store ssd",
            "store tiered"
        ]
    );
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

#[test]
fn an_ssd_store_conforms_when_it_is_small_slow_or_behind_the_page_cache() {
    let folder = tempfile::tempdir().expect("a folder for files");
    let spec = Ssd { directory: folder.path().to_owned(), capacity: Bytes(128 << 10), ..Ssd::default() };
    testkit::store::conforms(&spec);
    testkit::store::conforms(&Ssd {
        capacity: Bytes(300_001),
        write_buffer: Bytes(4096),
        queue_depth: 2,
        ..spec.clone()
    });
    testkit::store::conforms(&Ssd { io: SsdIo::Plain, capacity: Bytes(1 << 20), ..spec });
}

#[test]
fn a_tiered_store_conforms_whatever_is_behind_it_and_however_little_fits_in_memory() {
    for dram in [2, 1024, 1 << 20] {
        let backing = Box::new(Dram { capacity: Bytes(100_000) });
        testkit::store::conforms(&Tiered { dram: Bytes(dram), staging: Bytes(dram / 2), backing });
        with_ssd(200_000, |ssd| {
            let backing = Box::new(ssd);
            testkit::store::conforms(&Tiered { dram: Bytes(dram), staging: Bytes(dram / 2), backing });
        });
    }
}
