use super::*;
use crate::kernels::{self, KernelSpec};
use crate::testkit::compiler;
use oasis_core::policy::DeviceCode;
use std::path::PathBuf;

#[test]
fn every_kernel_compiles_without_spills_or_serialized_products() {
    let Some(compiler) = compiler() else { return };
    for unit in kernels::catalogue() {
        let cubin = compiler.compile(&unit).unwrap_or_else(|error| panic!("{:?}: {error}", unit.defines));
        assert!(!cubin.reports.is_empty(), "{}: no report", unit.source.name);
        for report in &cubin.reports {
            let bad = report.spills() || report.serialized;
            assert!(!bad, "{} {:?}: {report:?}", unit.source.name, unit.defines);
        }
    }
}

fn scan_of(summarizer: DeviceCode) -> Unit {
    kernels::Scan { head_dim: 64, group: 2, queries: 2, query: 1, max: false, stages: 2, summarizer, bytes: 128 }.unit()
}

fn scan_with(text: &'static str) -> Unit {
    scan_of(DeviceCode::new("mine.cuh", text))
}

#[test]
fn an_error_in_a_policy_shows_its_own_file_and_line() {
    let Some(compiler) = compiler() else { return };
    let error =
        compiler.compile(&scan_with("struct Summarizer {\n  static constexpr int kRows = one;\n};\n")).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("mine.cuh(2): error"), "{text}");
    assert!(text.contains("\"one\" is undefined"), "{text}");
}

#[test]
fn a_policys_file_may_have_the_name_of_a_kernels_and_include_those() {
    let Some(compiler) = compiler() else { return };
    let text = "#include \"layout.cuh\"
struct Summarizer {
    static constexpr int kRows = 1;
    static __device__ float init(int row) { return 0.0f; }
    static __device__ float update(int row, float value, float key) { return value + key; }
    static __device__ float finish(int row, float value, int tokens) { return value / kBlock; }
    static __device__ float expand(int row, float q) { return q; }
};
";
    let unit = scan_of(DeviceCode::new("summary.cuh", text));
    assert!(!compiler.compile(&unit).unwrap().reports.is_empty());
}

#[test]
fn the_cache_keeps_what_was_compiled_and_tells_sources_apart() {
    let Some(compiler) = compiler() else { return };
    let folder = tempfile::tempdir().unwrap();
    let compiler = Compiler { cache: Some(CubinCache::new(folder.path())), ..compiler };
    let files = || std::fs::read_dir(folder.path()).unwrap().count();
    let unit = kernels::Activation.unit();
    let first = compiler.compile(&unit).unwrap();
    assert_eq!((files(), &compiler.compile(&unit).unwrap()), (1, &first));
    let mut other = unit.clone();
    other.defines.push("UNUSED=1".to_owned());
    compiler.compile(&other).unwrap();
    assert_eq!(files(), 2);
    assert!(compiler.compile(&scan_with("broken")).is_err());
    assert_eq!(files(), 2);
}

#[test]
fn a_missing_compiler_names_what_was_searched_and_how_to_get_it() {
    let error = Nvrtc::open_in(&PathBuf::from("nowhere")).err().expect("there is no such folder").to_string();
    assert!(
        error.contains("nowhere/lib") && error.contains("fetch-nvrtc.sh") && error.contains("OASIS_NVRTC_DIR"),
        "{error}"
    );
}
