//! For tests of policies: their device code compiles with the kernels that run it. Needs the run-time compiler, no GPU.

use crate::compile::{Compiler, Nvrtc};
use crate::kernels::{KernelSpec, Select};
use oasis_core::policy::DeviceCode;
use std::io::Write;

/// A compiler for the GPUs that this crate runs on; `None`, said aloud, where there is none. It keeps nothing.
///
/// # Panics
/// When there is none and the environment says `CI`.
pub fn compiler() -> Option<Compiler> {
    match Nvrtc::open() {
        Ok(nvrtc) => Some(Compiler::new(nvrtc, "sm_90a", None)),
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "CI must compile the kernels: {error}");
            // Not the macro, whose output a passing test hides.
            let _ = writeln!(std::io::stderr(), "SKIPPED: no kernel is compiled. {error}");
            None
        }
    }
}

/// A selector's device code compiles with the kernel of every length of context, and spills no register.
///
/// # Panics
/// When it does not, with the compiler's words and the line of `code` that they are about.
pub fn selector_compiles(code: DeviceCode) {
    let Some(compiler) = compiler() else { return };
    for blocks in [1024, 2048, 4096, 8192, 16_384] {
        let unit = Select::for_blocks(128, 128, blocks, code).expect("there is a kernel for it").unit();
        let cubin = compiler.compile(&unit).unwrap_or_else(|error| panic!("{}: {error}", code.name));
        assert!(!cubin.reports.is_empty(), "{}: expected a report of its registers, found none", code.name);
        for report in &cubin.reports {
            assert!(!report.spills(), "{}, {blocks} blocks: expected no spilled register, found {report:?}", code.name);
        }
    }
}
