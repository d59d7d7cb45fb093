//! The device code of plugins compiles with the kernel that runs it.

// Links the crate, which registers its kinds.
use oasis_example_policy as _;
use oasis_tests as _;

use oasis_core::policy::{DeviceCode, SelectorSpec};
use oasis_cuda::compile::{Compiler, Nvrtc};
use oasis_cuda::kernels::{KernelSpec, Select};
use std::io::Write;

/// The code that `oasis new-policy selector` writes.
const SCAFFOLD: &str = include_str!("../../oasis-cli/assets/new-policy/order.cuh.txt");

#[test]
fn selectors_of_plugins_and_of_the_scaffold_compile() {
    let nvrtc = match Nvrtc::open() {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "CI must compile the kernels: {error}");
            let _ = writeln!(std::io::stderr(), "SKIPPED: no kernel is compiled. {error}");
            return;
        }
    };
    let compiler = Compiler::new(nvrtc, "sm_90a", None);
    let example = oasis_example_policy::UpperHalf {}.build().unwrap().device_code().unwrap();
    for code in [example, DeviceCode::new("order.cuh", SCAFFOLD)] {
        let unit = Select::for_blocks(64, 128, 1024, code).unwrap().unit();
        let cubin = compiler.compile(&unit).unwrap_or_else(|error| panic!("{}: {error}", code.name));
        assert!(!cubin.reports.is_empty() && cubin.reports.iter().all(|report| !report.spills()), "{}", code.name);
    }
}
