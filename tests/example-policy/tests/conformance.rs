//! The selector keeps what its trait promises.

use oasis_core::registry::{self, Role};
use oasis_core::testkit;
use oasis_example_policy::TopOnly;

#[test]
fn the_registered_kind_passes_the_suite_of_selectors() {
    testkit::conforms(registry::find(Role::Selector, "top-only").unwrap());
}

#[test]
fn it_passes_with_every_setting() {
    for (top, cap) in [(1, 1), (4, 0), (usize::MAX, usize::MAX)] {
        testkit::selector::conforms(&TopOnly { top, cap });
    }
}

#[test]
fn without_a_limit_on_ranks_it_is_capped_lru() {
    testkit::selector::equals_capped_lru(&TopOnly { top: usize::MAX, cap: 2 });
}
