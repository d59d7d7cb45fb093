//! The device code of plugins compiles with the kernel that runs it.

// Links the crate, which registers its kinds.
use oasis_example_policy as _;
use oasis_tests as _;

use oasis_core::policy::{DeviceCode, SelectorSpec};
use oasis_cuda::testkit::selector_compiles;

/// The code that `oasis new-policy selector` writes.
const SCAFFOLD: &str = include_str!("../../oasis-cli/assets/new-policy/order.cuh.txt");

#[test]
fn selectors_of_plugins_and_of_the_scaffold_compile() {
    selector_compiles(oasis_example_policy::UpperHalf {}.build().unwrap().device_code().unwrap());
    selector_compiles(DeviceCode::new("order.cuh", SCAFFOLD));
}

#[test]
#[should_panic(expected = "broken.cuh")]
fn a_selector_that_does_not_compile_is_named() {
    if std::env::var_os("CI").is_none() && oasis_cuda::testkit::compiler().is_none() {
        panic!("broken.cuh was not compiled: there is no compiler, as was said");
    }
    selector_compiles(DeviceCode::new("broken.cuh", "struct Policy { nonsense };"));
}
